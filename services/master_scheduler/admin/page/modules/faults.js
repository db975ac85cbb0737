// Faults and what was done about them, and what else happened: changes, steps of groups, errors.

import { el, redraw, span, table, time } from "./dom.js";

function incident(each, now) {
  const isOpen = !each.ended_at;
  const lasted = (Date.parse(each.ended_at || now) - Date.parse(each.began_at)) / 1000;
  const requests =
    [
      each.num_requests_moved ? `${each.num_requests_moved} requests went on elsewhere` : "",
      each.num_requests_failed ? `${each.num_requests_failed} requests failed` : "",
    ]
      .filter(Boolean)
      .join(", ") || "no request lost it";
  const steps = each.steps.map((step) => el("li", {}, time(step.at), step.what));
  return el(
    "article",
    { class: isOpen ? "card open" : "card" },
    el("h3", {}, time(each.began_at), ` ${each.instance_id}: ${each.cause}`),
    el(
      "p",
      {},
      el("span", { class: isOpen ? "bad" : "good" }, isOpen ? "✕ open" : "● over"),
      ` ${isOpen ? "since" : "after"} ${span(lasted)}; `,
      el("span", { class: each.num_requests_failed ? "bad" : "" }, requests),
    ),
    el("ol", { class: "steps" }, steps),
  );
}

export function drawIncidents(container, overview) {
  const list = [...overview.incidents].reverse();
  // An open one counts its time, so it is drawn anew.
  const now = list.some((each) => !each.ended_at) ? overview.now : "";
  redraw(container, { list, now }, () =>
    list.length
      ? el(
          "div",
          { class: "cards" },
          list.map((each) => incident(each, overview.now)),
        )
      : el("p", { class: "good" }, "● Nothing went wrong, as far as this master heard."),
  );
}

const KINDS = {
  "": "everything",
  change: "changes by operators",
  group: "steps of groups",
  upgrade: "upgrades",
  leader: "leaders",
  error: "errors",
};

export function happeningsView(container) {
  const list = el("div");
  const choice = el(
    "select",
    { "data-key": "happenings-kind" },
    Object.entries(KINDS).map(([value, name]) => el("option", { value }, name)),
  );
  container.append(el("p", {}, el("label", {}, "Show ", choice)), list);
  let latest = [];
  const draw = () => {
    const shown = latest.filter((each) => !choice.value || each.kind === choice.value);
    redraw(list, shown, () =>
      table(
        "what happened",
        ["at", "kind", "about", "what", "times"],
        shown.map((each) => [
          time(each.at),
          each.kind,
          each.about,
          each.what,
          each.count > 1 ? String(each.count) : "",
        ]),
        "nothing yet",
      ),
    );
  };
  choice.addEventListener("change", draw);
  return (overview) => {
    latest = [...overview.happenings].reverse();
    draw();
  };
}
