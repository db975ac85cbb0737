// TTFT and goodput of each scenario over the last hour, and its waiting room.

import { lineChart } from "./charts.js";
import { el, number, redraw, span, table } from "./dom.js";

const sum = (values) => values.reduce((total, value) => total + Number(value), 0);

function charts(scenario, history, width) {
  const times = scenario.num_answered.map(
    (_, n, every) => Date.parse(history.until) - 1000 * history.step_s * (every.length - 1 - n),
  );
  const perSecond = (values) => values.map((value) => Number(value) / history.step_s);
  const known = (values) => values.map((value) => value || null);
  const name = scenario.scenario;
  return [
    lineChart({
      key: `ttft:${name}`,
      title: "TTFT",
      unit: "ms",
      times,
      width,
      series: [
        { name: "half of the requests", values: known(scenario.ttft_p50_ms) },
        { name: "99 %", values: known(scenario.ttft_p99_ms) },
      ],
    }),
    lineChart({
      key: `goodput:${name}`,
      title: "Goodput",
      unit: "requests/s",
      times,
      width,
      series: [
        { name: "answered", values: perSecond(scenario.num_answered) },
        { name: "failed or refused", values: perSecond(scenario.num_failed) },
      ],
    }),
  ];
}

function summary(scenario) {
  const [answered, failed] = [sum(scenario.num_answered), sum(scenario.num_failed)];
  const whole = answered + failed;
  const good = whole ? `${number((100 * answered) / whole, 2)} % answered` : "no requests";
  return el(
    "p",
    { class: failed ? "warn" : "quiet" },
    `The last hour: ${number(answered, 0)} answered, ${number(failed, 0)} failed or refused ` +
      `(${good}), ${number(sum(scenario.num_cancelled), 0)} cancelled by clients, ${number(sum(scenario.num_tokens), 0)} tokens`,
  );
}

function rooms(list) {
  const rows = list.map((room) => {
    const counts = Object.entries(room.waiting).filter(([, count]) => count);
    const waiting = sum(counts.map(([, count]) => count));
    const rate = room.prefills_per_s;
    return [
      room.scenario,
      el("strong", { class: waiting ? "warn" : "good" }, String(waiting)),
      counts.map(([priority, count]) => `priority ${priority}: ${count}`).join(", ") || "–",
      room.max_waiting ? number(room.max_waiting, 0) : "none",
      rate ? number(rate) : "not known",
      waiting && rate ? span(waiting / rate) : "–",
    ];
  });
  return table(
    "waiting rooms",
    ["scenario", "waiting", "by priority", "limit", "prompts/s", "the last one waits about"],
    rows,
    "No instance serves a scenario, and nothing waits.",
  );
}

export function drawRooms(container, overview) {
  redraw(container, overview.waiting_rooms, rooms);
}

export function drawHistory(container, history) {
  const width = Math.max(280, Math.min(720, container.clientWidth - 30));
  redraw(container, { history, width }, () => {
    if (!history.scenarios.length) {
      return el(
        "p",
        { class: "quiet" },
        `No request has ended in the last hour, as far as this master knows. A step of ${history.step_s} s is shown when it is over.`,
      );
    }
    return el(
      "div",
      {},
      history.scenarios.map((each) =>
        el(
          "section",
          { class: "card", "aria-label": `scenario ${each.scenario}` },
          el("h3", {}, each.scenario),
          summary(each),
          el("div", { class: "cards" }, charts(each, history, width > 700 ? 480 : width)),
        ),
      ),
    );
  });
}
