// The operators' page: its views, the keys, and the loop that asks the master every two seconds.
//
// No build step and no library. Each module draws one concern; every text of the mesh becomes a text node (dom.js).

import { onDone, say, shown } from "./actions.js";
import { ask, showState, Unreachable } from "./api.js";
import { at, el } from "./dom.js";
import { drawGroups } from "./groups.js";
import { desiredView } from "./desired.js";
import { drawIncidents, happeningsView } from "./faults.js";
import { drawRatio } from "./ratio.js";
import { callerText, setCaller } from "./roles.js";
import { drawHistory, drawRooms } from "./scenarios.js";
import { storyView } from "./story.js";
import { drawStores } from "./stores.js";
import { drawMesh } from "./topology.js";

const EVERY_MS = 2000;
const SHARE = 20; // the answers of a large mesh take the master a while: they are asked for less often
const HISTORY_MS = 10000;
const VIEWS = [
  ["mesh", "Mesh"],
  ["scenarios", "Scenarios"],
  ["faults", "Faults"],
  ["groups", "Groups"],
  ["ratio", "Ratio"],
  ["request", "Request"],
  ["desired", "Desired state"],
  ["stores", "Pins, adapters, usage"],
];

const part = (title) => {
  const body = el("div");
  return [body, title ? [el("h3", {}, title), body] : body];
};
const view = (id, title, ...content) => {
  const section = el(
    "section",
    { id, hidden: true, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title`, tabindex: "-1" }, title),
    content,
  );
  at("content").append(section);
  return section;
};

const mesh = view("mesh", "Mesh").appendChild(el("div"));
const [rooms, roomsPart] = part("Waiting rooms");
const [history, historyPart] = part("TTFT and goodput of the last hour");
view("scenarios", "Scenarios", roomsPart, historyPart);
const [incidents, incidentsPart] = part("");
const [happenings, happeningsPart] = part("What happened");
view("faults", "Faults, and what was done", incidentsPart, happeningsPart);
const [groups, groupsPart] = part("");
const [notes, notesPart] = part("");
const [instances, instancesPart] = part("Instances");
const [out, outPart] = part("Out of service");
view("groups", "Groups", groupsPart, notesPart, instancesPart, outPart);
const ratio = view("ratio", "Ratio decisions").appendChild(el("div"));
const story = storyView(view("request", "A request's story"));
const drawDesired = desiredView(view("desired", "Desired state"));
const stores = view("stores", "Pins, adapters, usage").appendChild(el("div"));
const drawHappenings = happeningsView(happenings);

const current = () => {
  const id = location.hash.slice(1);
  return VIEWS.some(([each]) => each === id) ? id : "mesh";
};

function showView() {
  for (const [id] of VIEWS) at(id).hidden = id !== current();
  at("nav").replaceChildren(
    ...VIEWS.map(([id, title], n) =>
      el(
        "a",
        {
          href: `#${id}`,
          "aria-current": id === current() ? "page" : false,
          "aria-keyshortcuts": String(n + 1),
        },
        title,
      ),
    ),
  );
  document.title = `pdmesh: ${VIEWS.find(([id]) => id === current())[1]}`;
}

let historyAt = -Infinity;
let refreshing = null;

async function look() {
  const overview = await ask("GetOverview");
  setCaller(overview.caller);
  at("who").textContent = callerText();
  const states = await ask("ListGroupStates");
  const version =
    states.version === "0" ? "no desired state yet" : `desired state: version ${states.version}`;
  at("head").textContent = `${overview.leader_id}, epoch ${overview.epoch}, ${version}`;
  const who = overview.caller.role;
  drawMesh(mesh, overview, states, () => go("faults"));
  drawRooms(rooms, overview);
  drawIncidents(incidents, overview);
  drawHappenings(overview);
  drawGroups({ groups, notes, instances, out }, overview, states);
  drawRatio(ratio, states, who);
  if (current() === "scenarios" && performance.now() - historyAt > HISTORY_MS) {
    drawHistory(history, await ask("GetHistory"));
    historyAt = performance.now();
  }
  if (current() === "desired") await drawDesired(who);
  if (current() === "stores") await drawStores(stores, who);
}

async function lookOnce() {
  try {
    await look();
    if (showState(null)) say("the master answers again");
  } catch (error) {
    if (!(error instanceof Unreachable) && !error.reason) console.error(error); // a bug of this page
    showState(error);
  }
}

// One at a time: a slow master is not asked twice.
function refresh() {
  refreshing ??= lookOnce().finally(() => (refreshing = null));
  return refreshing;
}

async function loop() {
  const began = performance.now();
  if (!document.hidden) await refresh();
  setTimeout(loop, Math.max(EVERY_MS, SHARE * (performance.now() - began)));
}

async function go(id) {
  if (current() !== id) location.hash = id;
  showView();
  historyAt = -Infinity;
  at(`${id}-title`).focus({ preventScroll: true });
  await refresh();
}

function theme() {
  const root = document.documentElement;
  const isDark =
    (root.dataset.theme ||
      (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
}

const KEYS = [
  ["1 … 8", "show a view"],
  ["/", "find a request by its id"],
  ["r", "ask the master now"],
  ["t", "dark or light"],
  ["?", "these keys"],
  ["Tab, Enter", "go to an instance, and open it"],
  ["← →", "in a chart: read earlier values"],
  ["Esc", "close a dialog, change nothing"],
];
const showKeys = () =>
  shown(
    "Keys",
    el(
      "dl",
      {},
      KEYS.map(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)]),
    ),
  );

async function onKey(event) {
  const isTyping = event.target.closest("input, textarea, select, dialog");
  if (isTyping || event.ctrlKey || event.altKey || event.metaKey) return;
  const acts = { "?": showKeys, t: theme, r: refresh, "/": () => go("request").then(story.focus) };
  const chosen = VIEWS[Number(event.key) - 1];
  if (chosen) acts[event.key] = () => go(chosen[0]);
  if (!acts[event.key]) return;
  event.preventDefault();
  await acts[event.key]();
}

at("theme").addEventListener("click", theme);
at("help").addEventListener("click", showKeys);
at("login").addEventListener("submit", (event) => (event.preventDefault(), refresh()));
at("token").addEventListener("change", refresh);
addEventListener("hashchange", () => (showView(), (historyAt = -Infinity), refresh()));
addEventListener("keydown", onKey);
addEventListener("visibilitychange", () => document.hidden || refresh());
onDone(refresh);
showView();
loop();
