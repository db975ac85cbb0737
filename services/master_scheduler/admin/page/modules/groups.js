// Groups, instances, upgrades and what is out of service, as tables with their actions.

import { moveButton, promoteButton, uncordonButton } from "./actions.js";
import { el, lower, redraw, table } from "./dom.js";
import { actionsOf, faultText, roleOf, slotsText, stateText } from "./instances.js";

export const shape = (p, d, f = 0, e = 0, v = 0) =>
  [p || d ? `${p}P:${d}D` : "", f ? `${f}F` : "", e ? `${e}E` : "", v ? `${v}V` : ""]
    .filter(Boolean)
    .join(" ");

function readyShape(members) {
  const isReady = (m) => m.phase === "INSTANCE_PHASE_READY";
  const isWhole = (m) =>
    members.filter((o) => isReady(o) && o.domain?.domain_id === m.domain.domain_id).length ===
    m.domain.dp_size;
  // A data-parallel domain counts as one, by its rank 0, once all of its ranks are ready.
  const counts = (m) => isReady(m) && (!m.domain || (!m.domain.dp_rank && isWhole(m)));
  const of = (role) => members.filter((m) => m.role === role && counts(m)).length;
  return (
    shape(
      ...["ROLE_PREFILL", "ROLE_DECODE", "ROLE_FUSION", "ROLE_POOLING", "ROLE_ENCODER"].map(of),
    ) || "0"
  );
}

function groups(list) {
  return table(
    "groups",
    ["group", "scenario", "state", "wanted", "ready", "revision", "region", "detail", "change"],
    list.map((g) => [
      g.group_id,
      g.scenario,
      el("span", { class: { serving: "good", failed: "bad" }[g.state] || "warn" }, g.state),
      shape(
        g.num_prefill_wanted,
        g.num_decode_wanted,
        g.num_fusion_wanted,
        g.num_pooling_wanted,
        g.num_encoder_wanted,
      ),
      readyShape(g.members),
      g.revision,
      g.regions.join(", "),
      g.detail,
      g.num_prefill_wanted ? moveButton(g) : "",
    ]),
    "No desired state names a group: `pdmesh apply`, or the view Desired state, makes one.",
  );
}

function notes(states) {
  const upgrades = states.upgrades.map((u) => {
    const done = u.state === "went back" ? "" : ` (${u.num_changed} of ${u.num_groups} groups)`;
    return el(
      "p",
      {},
      `Upgrade of ${u.scenario} to version ${u.version}: ${u.state}${done}: ${u.detail} `,
      u.state === "canary" ? promoteButton(u.scenario) : "",
    );
  });
  const adjustments = states.adjustments.map((a) => {
    const shall = a.pool
      ? a.pool === "off"
        ? "off"
        : `lent to ${a.pool}`
      : shape(a.num_prefill, a.num_decode);
    return el("p", {}, `Adjusted: ${a.group_id}: ${shall} (${a.reason})`);
  });
  return [...upgrades, ...adjustments];
}

function instances(looks, states) {
  const members = new Map(states.groups.flatMap((g) => g.members.map((m) => [m.instance_id, m])));
  return table(
    "instances",
    ["instance", "group", "role", "state", "load", "may", "revision", "domain", "fault", "actions"],
    looks.map((look) => {
      const member = members.get(look.instance_id);
      const domain = member?.domain
        ? `${member.domain.domain_id} ${member.domain.dp_rank || 0}/${member.domain.dp_size}`
        : "";
      return [
        look.instance_id,
        look.group_id,
        roleOf(look),
        stateText(look),
        look.num_slots ? slotsText(look) : "",
        lower(member?.stage, "STAGE_").replace("unspecified", ""),
        member?.revision || "",
        domain,
        faultText(look),
        actionsOf(look, states.out_of_service),
      ];
    }),
    "no instance is registered",
  );
}

function outOfService(entries) {
  return table(
    "out of service",
    ["instance", "how", "reason", "since", "actions"],
    entries.map((each) => [
      each.instance_id,
      each.is_ejected ? "ejected" : each.mode === "LEAVE_MODE_DRAIN" ? "drained" : "cordoned",
      each.reason,
      each.since ? new Date(each.since).toLocaleString() : "",
      uncordonButton(each),
    ]),
    "no instance",
  );
}

export function drawGroups(containers, overview, states) {
  const who = overview.caller.role; // buttons depend on it
  redraw(containers.groups, { who, list: states.groups }, () => groups(states.groups));
  redraw(
    containers.notes,
    { who, upgrades: states.upgrades, adjustments: states.adjustments },
    () => notes(states),
  );
  redraw(containers.instances, { who, looks: overview.instances, states }, () =>
    instances(overview.instances, states),
  );
  redraw(containers.out, { who, list: states.out_of_service }, () =>
    outOfService(states.out_of_service),
  );
}
