// Decisions about P:D ratios with the numbers they were made from, and a move to a profile by hand.

import { button, confirmed, decided } from "./actions.js";
import { ask } from "./api.js";
import { el, number, redraw, table, time } from "./dom.js";

const percent = (share) => (share === undefined ? "not known" : `${number(100 * share)} %`);

function decision(each) {
  const numbers =
    each.e2e_s === undefined
      ? ""
      : el(
          "p",
          {},
          `The window's means: E2E ${number(each.e2e_s, 3)} s, of which T_p is ${percent(each.prefill_share)}`,
        );
  const groups = table(
    "the groups it looked at",
    ["group", "shape", "prefills busy", "decodes busy"],
    each.groups.map((g) => [
      g.group_id,
      `${g.num_prefill}P:${g.num_decode}D`,
      percent(g.prefill_busy),
      percent(g.decode_busy),
    ]),
    "",
  );
  const moves = each.moves.map((m) =>
    el(
      "li",
      {},
      [m.group_id, m.kind.replace("_", " "), m.role, m.to_group && `to ${m.to_group}`]
        .filter(Boolean)
        .join(" "),
    ),
  );
  return el(
    "article",
    { class: "card" },
    el("h3", {}, time(each.decided_at), ` ${each.scenario}: ${each.action}`),
    el("p", {}, each.reason),
    numbers,
    each.groups.length ? groups : "",
    moves.length ? el("ul", {}, moves) : "",
  );
}

const PROFILE = [
  ["t_p_s", "T_p: seconds of a prompt in a prefill"],
  ["num_prefill_slots", "b_p: prompts at once in a prefill"],
  ["t_d_s", "T_d: seconds of an answer in a decode"],
  ["num_decode_slots", "b_d: answers at once in a decode"],
];

async function moveToProfile(scenarios) {
  const values = await confirmed({
    title: "Move a scenario to the ratio for a profile?",
    text: "All groups of the scenario get the best ratio for such requests, by single moves, one after the other.",
    fields: [
      { name: "scenario", label: "Scenario", options: scenarios, value: scenarios[0] },
      ...PROFILE.map(([name, label]) => ({ name, label, type: "number", required: true })),
      { name: "reason", label: "Reason, for the record" },
      { name: "isForced", label: "even if the others become too busy", type: "checkbox" },
    ],
    verb: "Plan the moves",
  });
  if (!values) return null;
  const profile = Object.fromEntries(PROFILE.map(([name]) => [name, Number(values[name])]));
  return decided(
    await ask("PlanMoves", {
      scenario: values.scenario,
      profile,
      reason: values.reason,
      is_forced: values.isForced,
    }),
  );
}

export function drawRatio(container, states, who) {
  const scenarios = [...new Set(states.groups.map((each) => each.scenario))].filter(Boolean);
  redraw(container, { who, scenarios, list: states.decisions }, () => [
    el(
      "p",
      {},
      "Single moves are at each group, in the view Groups. ",
      scenarios.length
        ? button("Move to a profile", "PlanMoves", "profile", () => moveToProfile(scenarios))
        : "",
    ),
    states.decisions.length
      ? el("div", { class: "cards" }, [...states.decisions].reverse().map(decision))
      : el(
          "p",
          { class: "quiet" },
          "This leader has made no decision yet. A scenario with `ratio: auto` is looked at after each window of requests.",
        ),
  ]);
}
