// Buttons that change the mesh. Each asks for a confirmation, which says what will happen and takes a reason.

import { ask } from "./api.js";
import { at, byKey, el } from "./dom.js";
import { whyNot } from "./roles.js";

let afterwards = async () => {};
export function onDone(refresh) {
  afterwards = refresh;
}

export function say(text) {
  at("said").textContent = text;
}

// Runs `act`, says its answer or what went wrong, and shows the mesh as it is then.
export async function run(act) {
  say("");
  try {
    say((await act()) ?? "nothing was changed");
    await afterwards();
  } catch (error) {
    say(error.message);
  }
}

// A button that stays in the tab order for a role that may not press it, and says why.
export function button(label, method, key, act, more = {}) {
  const why = method ? whyNot(method) : "";
  const onclick = () => (why ? say(why) : run(act));
  const refused = why ? { "aria-disabled": "true", title: why, "aria-description": why } : {};
  return el("button", { type: "button", "data-key": key, onclick, ...refused, ...more }, label);
}

let opener; // what opened the dialog gets the focus back, even if it was drawn anew

function open(title, ...content) {
  const dialog = at("dialog");
  dialog.replaceChildren(el("h2", { id: "dialog-title" }, title), ...content.flat());
  if (dialog.open) return dialog; // one question leads to the next
  opener = document.activeElement?.dataset?.key;
  dialog.addEventListener("close", () => opener && byKey(opener)?.focus(), { once: true });
  dialog.showModal();
  return dialog;
}

// Resolves with the values of the fields, or null. A field: {name, label, type, value, options, required}.
export function confirmed({ title, text, fields = [], verb, isSerious = false }) {
  const inputs = fields.map((field) => input(field));
  const cancel = el("button", { type: "button", onclick: () => at("dialog").close() }, "Cancel");
  const form = el(
    "form",
    {},
    [text].flat().map((each) => (typeof each === "string" ? el("p", {}, each) : each)),
    inputs.map(([, label]) => label),
    el("p", {}, el("button", { type: "submit", class: isSerious ? "serious" : "" }, verb), cancel),
  );
  const dialog = open(title, form);
  return new Promise((resolve) => {
    let values = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      values = Object.fromEntries(
        inputs.map(([field, , control]) => [
          field.name,
          field.type === "checkbox" ? control.checked : control.value,
        ]),
      );
      dialog.close();
    });
    dialog.addEventListener("close", () => resolve(values), { once: true });
    (inputs[0]?.[2] ?? cancel).focus();
  });
}

function input({ name, label, type = "text", value = "", options, required = false }) {
  const field = { name, type };
  if (options) {
    const control = el(
      "select",
      { name },
      options.map((each) => el("option", { value: each, selected: each === value }, each)),
    );
    return [field, el("label", {}, label, control), control];
  }
  const control = el("input", {
    name,
    type,
    required,
    maxlength: type === "text" ? 1000 : undefined,
    step: "any",
  });
  if (type !== "checkbox") control.value = value;
  return [
    field,
    type === "checkbox" ? el("label", {}, control, " ", label) : el("label", {}, label, control),
    control,
  ];
}

// Shows something without a question.
export function shown(title, content) {
  const close = el("button", { type: "button", onclick: () => at("dialog").close() }, "Close");
  open(title, content, el("p", {}, close));
}

const REASON = { name: "reason", label: "Reason, for the record" };

async function takeOut(instance, mode, title, text, verb) {
  const values = await confirmed({ title, text, fields: [REASON], verb, isSerious: true });
  if (!values) return null;
  await ask("CordonInstance", { instance_id: instance, mode, reason: values.reason });
  return `${instance} leaves`;
}

export const drainButton = (instance) =>
  button("Drain", "CordonInstance", `drain:${instance}`, () =>
    takeOut(
      instance,
      "LEAVE_MODE_DRAIN",
      `Drain ${instance}?`,
      "It takes no new requests, finishes those that run, and leaves its group. If the scenario needs it, another instance takes its place first.",
      "Drain",
    ),
  );

export const cordonButton = (instance) =>
  button(
    "Cordon",
    "CordonInstance",
    `cordon:${instance}`,
    () =>
      takeOut(
        instance,
        "LEAVE_MODE_AT_ONCE",
        `Cordon ${instance}?`,
        "It goes out of service at once, and its requests go on at other instances.",
        "Cordon",
      ),
    { class: "serious" },
  );

export const uncordonButton = (entry) =>
  button("Uncordon", "UncordonInstance", `uncordon:${entry.instance_id}`, async () => {
    const why = entry.reason ? `It is out of service because: ${entry.reason}` : "";
    const values = await confirmed({
      title: `Put ${entry.instance_id} back into service?`,
      text: ["It may get a role and requests again.", why].filter(Boolean),
      verb: "Uncordon",
    });
    if (!values) return null;
    const answer = await ask("UncordonInstance", {
      instance_id: entry.instance_id,
      mode: entry.mode,
    });
    return (
      `${entry.instance_id} may get a role again` +
      (answer.fault ? `; its fault was: ${answer.fault}` : "")
    );
  });

export const promoteButton = (scenario) =>
  button("Promote", "PromoteUpgrade", `promote:${scenario}`, async () => {
    const text = "All groups of the scenario get the canary's revision, one after the other.";
    if (!(await confirmed({ title: `Promote the canary of ${scenario}?`, text, verb: "Promote" })))
      return null;
    const { scenarios } = await ask("PromoteUpgrade", { scenario });
    return `the canary's revision goes to all groups of ${scenarios.join(", ")}`;
  });

// A move of one instance within a group, as `pdmesh ratio --more, --add, --remove` makes it.
const MOVES = {
  "one decode becomes a prefill": ["change_role", "prefill"],
  "one prefill becomes a decode": ["change_role", "decode"],
  "a blank instance becomes a prefill": ["add", "prefill"],
  "a blank instance becomes a decode": ["add", "decode"],
  "one prefill becomes blank": ["remove", "prefill"],
  "one decode becomes blank": ["remove", "decode"],
};

export const moveButton = (group) =>
  button("Change the ratio…", "PlanMoves", `move:${group.group_id}`, async () => {
    const values = await confirmed({
      title: `Change the ratio of ${group.group_id}?`,
      text: "The instance finishes its requests first.",
      fields: [
        { name: "move", label: "Move", options: Object.keys(MOVES), value: Object.keys(MOVES)[0] },
        REASON,
        { name: "isForced", label: "even if the others become too busy", type: "checkbox" },
      ],
      verb: "Plan the move",
    });
    if (!values) return null;
    const [kind, role] = MOVES[values.move];
    const moves = [{ group_id: group.group_id, kind, role }];
    return decided(
      await ask("PlanMoves", {
        scenario: group.scenario,
        moves,
        reason: values.reason,
        is_forced: values.isForced,
      }),
    );
  });

export const decided = (answer) =>
  answer.decisions.map((each) => `${each.action}: ${each.reason}`).join("\n");
