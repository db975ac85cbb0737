// The mesh as a drawing: a box for each group, prefills on its left, decodes on its right, KV flows between them.

import { button } from "./actions.js";
import { el, number, redraw, svg, table } from "./dom.js";
import { faultText, roleOf, showInstance, slotsText, stateOf } from "./instances.js";

const NODE = { width: 148, height: 54, gap: 12 };
const WIDTH = 380;
const lastSeen = new Map(); // how instances looked, for those that are gone now

const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

// Instances, and those that died and were not replaced by a process of the same name.
function withGone({ instances, incidents }) {
  const here = new Set(instances.map((each) => each.instance_id));
  for (const each of instances) if (each.group_id) lastSeen.set(each.instance_id, each);
  const gone = incidents
    .filter(
      (each) => !each.ended_at && !here.has(each.instance_id) && lastSeen.has(each.instance_id),
    )
    .map((each) => ({ ...lastSeen.get(each.instance_id), isGone: true }));
  return [...instances, ...gone];
}

function node(look, x, y, outOfService) {
  const [word, kind, sign] = stateOf(look);
  const role = roleOf(look);
  const load = look.num_slots ? Math.min(1, look.num_slots_used / look.num_slots) : 0;
  const act = () => showInstance(look, outOfService);
  const facts = [
    look.instance_id,
    role,
    word,
    look.num_slots && !look.isGone ? slotsText(look) : "",
    faultText(look),
  ];
  const names = ["node", role, kind === "bad" ? "is-bad" : "", look.isGone ? "is-gone" : ""]
    .filter(Boolean)
    .join(" ");
  const label = facts.filter(Boolean).join(", ");
  const drawn = svg(
    "g",
    {
      class: names,
      role: "button",
      tabindex: "0",
      "aria-label": label,
      transform: `translate(${x} ${y})`,
      "data-key": `node:${look.instance_id}`,
      onclick: act,
    },
    svg("title", {}, label),
    svg("rect", { class: "box", width: NODE.width, height: NODE.height, rx: 6 }),
    svg("text", { x: 9, y: 19 }, short(look.instance_id, 19)),
    svg("text", { x: 9, y: 36, class: kind }, `${sign} ${word}`),
    svg(
      "text",
      { x: NODE.width - 9, y: 36, class: "quiet", "text-anchor": "end" },
      [
        role === "none" ? "" : role,
        look.isGone || !look.num_slots ? "" : `${look.num_slots_used}/${look.num_slots}`,
      ].join(" "),
    ),
    svg("rect", { class: "track", x: 9, y: 43, width: NODE.width - 18, height: 4, rx: 2 }),
    svg("rect", {
      class: "load",
      x: 9,
      y: 43,
      width: (NODE.width - 18) * (look.isGone ? 0 : load),
      height: 4,
      rx: 2,
    }),
  );
  drawn.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  });
  return drawn;
}

const perSecond = (count, windowS) => `${number(count / windowS, 2)}/s`;
const flowText = (flow, windowS) =>
  `${flow.prefill_id} → ${flow.decode_id}: ${perSecond(flow.num_requests, windowS)} requests, ` +
  `${perSecond(Number(flow.num_tokens), windowS)} tokens of KV, ${number(flow.mean_transfer_ms)} ms each`;

function groupDrawing(name, looks, flows, windowS, outOfService) {
  const isRight = (look, n) => (roleOf(look) === "none" ? n % 2 === 1 : roleOf(look) === "decode");
  const [left, right] = [looks.filter((each, n) => !isRight(each, n)), looks.filter(isRight)];
  const place = (list, x) =>
    new Map(list.map((each, n) => [each.instance_id, [x, 4 + n * (NODE.height + NODE.gap)]]));
  const places = new Map([...place(left, 4), ...place(right, WIDTH - NODE.width - 4)]);
  const most = Math.max(1, ...flows.map((flow) => flow.num_requests));
  const paths = flows.flatMap((flow) => {
    const [from, to] = [places.get(flow.prefill_id), places.get(flow.decode_id)];
    if (!from || !to) return [];
    const [x1, y1, x2, y2] = [
      from[0] + NODE.width,
      from[1] + NODE.height / 2,
      to[0],
      to[1] + NODE.height / 2,
    ];
    const path = svg(
      "path",
      {
        class: "flow",
        d: `M${x1} ${y1}C${x1 + 40} ${y1} ${x2 - 40} ${y2} ${x2} ${y2}`,
        "stroke-width": 1 + 5 * (flow.num_requests / most),
      },
      svg("title", {}, flowText(flow, windowS)),
    );
    return [path];
  });
  const rates = left.flatMap((look) => {
    const sent = flows
      .filter((flow) => flow.prefill_id === look.instance_id)
      .reduce((sum, flow) => sum + flow.num_requests, 0);
    const [x, y] = places.get(look.instance_id);
    const text = perSecond(sent, windowS);
    return sent
      ? [
          svg(
            "text",
            { class: "rate quiet", x: x + NODE.width + 3, y: y + NODE.height / 2 - 9 },
            text,
          ),
        ]
      : [];
  });
  const height = Math.max(1, left.length, right.length) * (NODE.height + NODE.gap);
  const nodes = looks.map((each) => node(each, ...places.get(each.instance_id), outOfService));
  return svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${height}`,
      class: "group",
      role: "group",
      "aria-label": `instances of ${name}`,
    },
    paths,
    rates,
    nodes,
  );
}

function groupCard(group, looks, data) {
  const flows = data.flows.filter((flow) =>
    looks.some((each) => each.instance_id === flow.prefill_id),
  );
  const name = group.group_id || "no group";
  const state = group.state ? `, ${group.state}` : "";
  return el(
    "section",
    { class: "card", "aria-label": `group ${name}` },
    el(
      "h3",
      {},
      name,
      " ",
      el("span", { class: "quiet" }, `${looks[0]?.scenario || group.scenario || ""}${state}`),
    ),
    group.detail ? el("p", { class: "warn" }, group.detail) : "",
    groupDrawing(name, looks, flows, data.flow_window_s, data.out_of_service),
  );
}

function blankCard(looks, data) {
  return el(
    "section",
    { class: "card", "aria-label": "blank instances" },
    el("h3", {}, `Blank instances (${looks.length})`),
    looks.length
      ? groupDrawing("no role", looks, [], 1, data.out_of_service)
      : el(
          "p",
          { class: "quiet" },
          "None: nothing but a restart takes the place of an instance that dies.",
        ),
  );
}

function processes(list) {
  return table(
    "other processes",
    ["process", "service", "region", "version", ""],
    list.map((each) => [
      each.instance_id,
      each.service,
      each.region,
      each.version,
      each.is_leader ? "leads" : "",
    ]),
  );
}

function openIncidents(incidents, goTo) {
  const open = incidents.filter((each) => !each.ended_at);
  if (!open.length) return el("p", { class: "good" }, "● No open incident");
  const text = open.map((each) => `${each.instance_id}: ${each.cause}`).join("; ");
  return el(
    "p",
    { class: "bad" },
    `✕ ${open.length} open: ${text} `,
    button("What is done", "", "to-faults", goTo),
  );
}

export function drawMesh(container, overview, states, goToFaults) {
  const looks = withGone(overview);
  const data = {
    looks,
    flows: overview.flows,
    flow_window_s: overview.flow_window_s,
    incidents: overview.incidents,
    processes: overview.processes,
    groups: states.groups.map(({ group_id, scenario, state, detail }) => ({
      group_id,
      scenario,
      state,
      detail,
    })),
    out_of_service: states.out_of_service,
    paused: states.paused,
    who: overview.caller.role,
  };
  redraw(container, data, () => {
    const of = (id) => looks.filter((each) => each.group_id === id && roleOf(each) !== "none");
    const known = data.groups.map((each) => each.group_id);
    const others = [...new Set(looks.map((each) => each.group_id))]
      .filter((id) => !known.includes(id))
      .sort();
    const cards = [...data.groups, ...others.map((group_id) => ({ group_id }))]
      .map((group) => [group, of(group.group_id)])
      .filter(([group, members]) => members.length || group.state)
      .map(([group, members]) => groupCard(group, members, data));
    const blank = looks.filter((each) => roleOf(each) === "none");
    return [
      openIncidents(data.incidents, () => (goToFaults(), "")),
      data.paused
        ? el("p", { class: "warn" }, `▲ The leader changes nothing now: ${data.paused}`)
        : "",
      el("div", { class: "cards" }, cards, blankCard(blank, data)),
      el(
        "details",
        { "data-key": "flows" },
        el("summary", {}, "KV flows of the last minute, as a list"),
        el(
          "ul",
          {},
          data.flows.map((flow) => el("li", {}, flowText(flow, data.flow_window_s))),
        ),
      ),
      el(
        "details",
        { "data-key": "processes" },
        el("summary", {}, `Other processes (${data.processes.length})`),
        processes(data.processes),
      ),
    ].filter((each) => each !== "");
  });
}
