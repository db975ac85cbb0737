// What happened to one request, step by step, found by its id.

import { run, say } from "./actions.js";
import { ask } from "./api.js";
import { el, number, table, time } from "./dom.js";

function story(found) {
  const first = Date.parse(found.steps[0].at);
  const facts = [
    ["request", found.request_id],
    ["scenario", found.scenario],
    ["model", found.model],
    ["outcome", found.outcome && `${found.outcome}${found.reason ? ` (${found.reason})` : ""}`],
    ["trace", found.trace_id],
  ].filter(([, value]) => value);
  return [
    el(
      "dl",
      {},
      facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    ),
    table(
      "steps",
      ["at", "since it came", "told by", "what"],
      found.steps.map((step) => [
        time(step.at),
        `${number(Date.parse(step.at) - first)} ms`,
        step.told_by,
        step.what,
      ]),
    ),
  ];
}

export function storyView(container) {
  const field = el("input", {
    id: "request-id",
    size: 40,
    required: true,
    maxlength: 128,
    spellcheck: "false",
    placeholder: "chatcmpl-…",
  });
  const form = el(
    "form",
    {},
    el("label", {}, "Request id ", field),
    el("button", { type: "submit" }, "Tell its story"),
  );
  const answer = el("div", { "aria-live": "polite" });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(async () => {
      answer.replaceChildren();
      answer.replaceChildren(
        ...story(await ask("GetRequestStory", { request_id: field.value.trim() })).flat(),
      );
      return "";
    });
  });
  container.append(
    el(
      "p",
      { class: "quiet" },
      "The id of an answer (chatcmpl-…, resp_…, msg_…) or of the header x-request-id. This master knows the latest 10,000 requests; `pdmesh trace` reads the logs.",
    ),
    form,
    answer,
  );
  return { focus: () => (say(""), field.focus()) };
}
