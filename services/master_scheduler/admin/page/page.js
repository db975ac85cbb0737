"use strict";
// Everything is drawn with textContent: names and reasons come from people.

const at = (id) => document.getElementById(id);
let loadedVersion = null; // of the text in the editor: applying it over another one is refused

async function ask(method, request = {}) {
  const headers = { "content-type": "application/json" };
  if (at("token").value) headers.authorization = "Bearer " + at("token").value;
  const response = await fetch("admin/" + method, { method: "POST", headers, body: JSON.stringify(request) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  return answer;
}

function cell(content, kind = "td") {
  const element = document.createElement(kind);
  element.append(...[].concat(content));
  return element;
}

function table(id, names, rows) {
  const head = document.createElement("tr");
  head.append(...names.map((name) => cell(name, "th")));
  const lines = rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...row.map((each) => cell(each)));
    return line;
  });
  at(id).replaceChildren(head, ...lines);
}

function button(name, act) {
  const element = document.createElement("button");
  element.textContent = name;
  element.onclick = () => run(act);
  return element;
}

function marked(text) {
  const element = document.createElement("span");
  element.textContent = text;
  element.className = text;
  return element;
}

const lower = (name, prefix) => name.replace(prefix, "").toLowerCase();
const shape = (p, d, f, e, v) =>
  [p || d ? `${p}P:${d}D` : "", f ? `${f}F` : "", e ? `${e}E` : "", v ? `${v}V` : ""].filter(Boolean).join(" ");
const percent = (share) => (share === undefined ? "?" : Math.round(100 * share) + "%");

function readyShape(members) {
  const isReady = (m) => m.phase === "INSTANCE_PHASE_READY";
  const isWhole = (m) => members.filter((o) => isReady(o) && o.domain?.domain_id === m.domain.domain_id).length
    === m.domain.dp_size;
  // A data-parallel domain counts as one, by its rank 0, once all of its ranks are ready.
  const counts = (m) => isReady(m) && (!m.domain || (!m.domain.dp_rank && isWhole(m)));
  const of = (role) => members.filter((m) => m.role === role && counts(m)).length;
  const roles = ["ROLE_PREFILL", "ROLE_DECODE", "ROLE_FUSION", "ROLE_POOLING", "ROLE_ENCODER"];
  return shape(...roles.map(of)) || "0";
}

function takeOut(instance, mode, verb) {
  return button(verb, async () => {
    const reason = prompt(`Why is ${instance} taken out of service?`, "");
    if (reason === null) return "nothing was changed";
    await ask("CordonInstance", { instance_id: instance, mode, reason });
    return `${instance} leaves`;
  });
}

function putBack(each) {
  return button("uncordon", async () => {
    await ask("UncordonInstance", { instance_id: each.instance_id, mode: each.mode });
    return `${each.instance_id} may get a role again`;
  });
}

function more(group, role) {
  return button("more " + role + "s", async () => {
    const moves = [{ group_id: group.group_id, kind: "change_role", role }];
    const answer = await ask("PlanMoves", { scenario: group.scenario, moves });
    return answer.decisions.map((d) => `${d.action}: ${d.reason}`).join("\n");
  });
}

function drawGroups(states) {
  table(
    "groups",
    ["group", "scenario", "state", "wanted", "ready", "revision", "region", "detail", ""],
    states.groups.map((g) => [
      g.group_id, g.scenario, marked(g.state),
      shape(
        g.num_prefill_wanted, g.num_decode_wanted, g.num_fusion_wanted, g.num_pooling_wanted,
        g.num_encoder_wanted,
      ),
      readyShape(g.members), g.revision, g.regions.join(", "), g.detail,
      g.num_prefill_wanted ? [more(g, "prefill"), more(g, "decode")] : "",
    ]),
  );
  const notes = [];
  const note = (text, ...more) => notes.push(cell([text, ...more], "p"));
  if (states.paused) note("The leader changes nothing now: " + states.paused);
  for (const u of states.upgrades) {
    const promote = button("promote", async () => {
      await ask("PromoteUpgrade", { scenario: u.scenario });
      return "all groups get the canary's revision";
    });
    const done = u.state === "went back" ? "" : ` (${u.num_changed} of ${u.num_groups} groups)`;
    const text = `Upgrade of ${u.scenario} to version ${u.version}: ${u.state}${done}: ${u.detail} `;
    note(text, ...(u.state === "canary" ? [promote] : []));
  }
  for (const a of states.adjustments) {
    const shall = a.pool ? (a.pool === "off" ? "off" : `lent to ${a.pool}`) : shape(a.num_prefill, a.num_decode, 0);
    note(`Adjusted: ${a.group_id}: ${shall} (${a.reason})`);
  }
  for (const each of states.out_of_service) {
    const drain = each.mode === "LEAVE_MODE_DRAIN" ? ", to drain" : "";
    note(`${each.is_ejected ? "Ejected" : "Cordoned"}${drain}: ${each.instance_id} (${each.reason}) `, putBack(each));
  }
  at("notes").replaceChildren(...notes);
}

function drawMembers(states) {
  const rows = states.groups.flatMap((group) =>
    group.members.map((m) => [
      m.instance_id, group.group_id, lower(m.role, "ROLE_"), marked(lower(m.phase, "INSTANCE_PHASE_")),
      lower(m.stage, "STAGE_"), m.revision,
      m.domain ? `${m.domain.domain_id} ${m.domain.dp_rank || 0}/${m.domain.dp_size}` : "",
      [takeOut(m.instance_id, "LEAVE_MODE_DRAIN", "drain"), takeOut(m.instance_id, "LEAVE_MODE_AT_ONCE", "cordon")],
    ]),
  );
  table("members", ["instance", "group", "role", "phase", "may", "revision", "domain", ""], rows);
  const blank = states.blank_instance_ids;
  at("blank").textContent = blank.length ? "Blank: " + blank.join(", ") : "No blank instances.";
}

function drawDecisions(states) {
  const rows = [...states.decisions].reverse().map((d) => [
    new Date(d.decided_at).toLocaleTimeString(), d.scenario, d.action, d.reason,
    d.e2e_s === undefined ? "" : `E2E ${d.e2e_s.toFixed(2)} s, T_p/E2E ${percent(d.prefill_share)}`,
    d.groups.map((g) => `${g.group_id} ${g.num_prefill}P:${g.num_decode}D, busy ${percent(g.prefill_busy)} / ${percent(g.decode_busy)}`).join("; "),
    d.moves.map((m) => [m.group_id, m.kind, m.role, m.to_group].filter(Boolean).join(" ")).join("; "),
  ]);
  table("decisions", ["at", "scenario", "decision", "why", "window", "groups", "moves"], rows);
}

function drawUsage(book) {
  const rows = book.accounts.map((a) => [
    a.service, a.scenario, a.group_id, a.pool, String(a.num_instances), (a.instance_s / 3600).toFixed(2),
  ]);
  table("usage", ["service", "scenario", "group", "pool", "instances now", "instance hours"], rows);
}

async function refresh() {
  try {
    const states = await ask("ListGroupStates");
    at("head").textContent = states.version === "0" ? "no desired state yet" : `desired state: version ${states.version}`;
    drawGroups(states);
    drawMembers(states);
    drawDecisions(states);
    drawUsage((await ask("GetUsage")).book);
    at("problem").textContent = "";
  } catch (error) {
    at("problem").textContent = error.message;
  }
}

const changeLine = (c) =>
  c.before === undefined ? `+ ${c.path}: ${c.after}` : c.after === undefined ? `- ${c.path}: ${c.before}` : `~ ${c.path}: ${c.before} -> ${c.after}`;
const changesText = (changes) => (changes.length ? changes.map(changeLine).join("\n") : "nothing differs");

async function run(act) {
  try {
    at("said").textContent = await act();
    await refresh();
  } catch (error) {
    at("said").textContent = error.message;
  }
}

async function load() {
  const { desired } = await ask("GetDesired");
  loadedVersion = desired ? desired.version : "0";
  at("text").value = desired ? desired.text : "";
  return `this is version ${loadedVersion}`;
}

async function apply() {
  const request = { text: at("text").value, author: "page", reason: at("reason").value };
  if (loadedVersion !== null) request.expected_version = loadedVersion;
  if (at("share").value) request.canary_share = Number(at("share").value);
  const answer = await ask("ApplyDesired", request);
  loadedVersion = answer.version;
  return changesText(answer.changes) + `\nversion ${answer.version} is the desired state`;
}

async function rollback() {
  const answer = await ask("RollbackDesired", { author: "page", reason: at("reason").value });
  loadedVersion = null;
  return changesText(answer.changes) + `\nversion ${answer.version} has the content of version ${answer.restored_version}`;
}

at("load").onclick = () => run(load);
at("diff").onclick = () => run(async () => changesText((await ask("DiffDesired", { text: at("text").value })).changes));
at("apply").onclick = () => run(apply);
at("rollback").onclick = () => run(rollback);
at("token").onchange = refresh;
refresh();
setInterval(refresh, 2000);
