// The desired state: its text, what a new one changes, and its versions.

import { button, confirmed } from "./actions.js";
import { ask } from "./api.js";
import { el, redraw, table } from "./dom.js";

const changeLine = (c) =>
  c.before === undefined
    ? `+ ${c.path}: ${c.after}`
    : c.after === undefined
      ? `- ${c.path}: ${c.before}`
      : `~ ${c.path}: ${c.before} → ${c.after}`;
const changesText = (changes) =>
  changes.length ? changes.map(changeLine).join("\n") : "nothing differs";
const EMPTY = {
  name: "allowEmpty",
  label: "even if no group is left, which releases all instances",
  type: "checkbox",
};
const REASON = { name: "reason", label: "Reason, for the record" };

let loadedVersion = null; // of the text in the editor: applying it over another one is refused

async function load(text, version = 0) {
  const { desired } = await ask("GetDesired", { version });
  text.value = desired ? desired.text : "";
  // An old version is edited to become the next one; it is compared with the current one when applied.
  loadedVersion = version ? null : desired ? desired.version : "0";
  return desired ? `this is version ${desired.version}` : "no desired state was ever applied";
}

async function apply(text) {
  const { changes, version } = await ask("DiffDesired", { text: text.value });
  const values = await confirmed({
    title: "Apply this desired state?",
    text: [`Against version ${version}:`, el("pre", {}, changesText(changes))],
    fields: [
      REASON,
      { name: "share", label: "Share of the requests for a canary, such as 0.05; empty: none" },
      EMPTY,
    ],
    verb: "Apply",
    isSerious: true,
  });
  if (!values) return null;
  const request = {
    text: text.value,
    author: "page",
    reason: values.reason,
    allow_empty: values.allowEmpty,
  };
  request.expected_version = loadedVersion ?? version; // what was confirmed is what is applied
  if (values.share) {
    request.canary_share = Number(values.share);
    // Zero, or what is no number, would mean: all groups at once.
    if (!(request.canary_share > 0 && request.canary_share < 1))
      throw new Error(`canary share: ${values.share} is not between 0 and 1`);
  }
  const answer = await ask("ApplyDesired", request);
  loadedVersion = answer.version;
  return `${changesText(answer.changes)}\nversion ${answer.version} is the desired state`;
}

async function rollback(version) {
  const values = await confirmed({
    title: version ? `Restore version ${version}?` : "Restore the version before the current one?",
    text: "It becomes a new version. Groups change until they are as it says.",
    fields: [REASON, EMPTY],
    verb: "Roll back",
    isSerious: true,
  });
  if (!values) return null;
  const answer = await ask("RollbackDesired", {
    version,
    author: "page",
    reason: values.reason,
    allow_empty: values.allowEmpty,
  });
  loadedVersion = null;
  return `${changesText(answer.changes)}\nversion ${answer.version} has the content of version ${answer.restored_version}`;
}

function versions(list, text) {
  return table(
    "versions",
    ["version", "applied", "author", "reason", "canary", "actions"],
    list.map((each, n) => [
      each.version,
      new Date(each.applied_at).toLocaleString(),
      each.author,
      each.reason,
      each.canary_share ? String(each.canary_share) : "",
      [
        button("Show", "GetDesired", `show:${each.version}`, () => load(text, each.version)),
        n
          ? button("Roll back to it", "RollbackDesired", `back:${each.version}`, () =>
              rollback(each.version),
            )
          : "",
      ],
    ]),
    "No desired state was ever applied.",
  );
}

// Returns what draws the view, whose buttons depend on the caller's role.
export function desiredView(container) {
  const text = el("textarea", {
    id: "text",
    rows: 16,
    spellcheck: "false",
    "aria-label": "the desired state, in YAML",
  });
  const [buttons, history] = [el("p"), el("div")];
  container.append(text, buttons, el("h3", {}, "Versions"), history);
  let isLoaded = false;
  return async (who) => {
    redraw(buttons, who, () => [
      button("Load the current version", "GetDesired", "load", () => load(text)),
      button("Show changes", "DiffDesired", "diff", async () =>
        changesText((await ask("DiffDesired", { text: text.value })).changes),
      ),
      button("Apply…", "ApplyDesired", "apply", () => apply(text), { class: "serious" }),
      button("Roll back…", "RollbackDesired", "rollback", () => rollback(0), { class: "serious" }),
    ]);
    const list = (await ask("ListDesiredVersions", { limit: 20 })).versions;
    redraw(history, { who, list }, () => versions(list, text));
    if (!isLoaded && !text.value) {
      isLoaded = true;
      await load(text);
    }
  };
}
