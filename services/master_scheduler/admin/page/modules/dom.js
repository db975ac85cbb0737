// Makes elements. What comes from the mesh becomes text nodes only, so that no name is ever markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined || value === null) continue;
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(
    ...children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== ""),
  );
  return element;
}

export const at = (id) => document.getElementById(id);
export const el = (name, attributes = {}, ...children) =>
  filled(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, name), attributes, children);

// On narrow screens a row is a block, so each cell knows the name of its column.
export function table(caption, names, rows, empty = "none") {
  if (!rows.length) return el("p", { class: "quiet" }, empty);
  const head = el(
    "tr",
    { role: "row" },
    names.map((name) => el("th", { scope: "col", role: "columnheader" }, name)),
  );
  const body = rows.map((row) =>
    el(
      "tr",
      { role: "row" },
      row.map((each, n) => el("td", { role: "cell", "data-name": names[n] }, each)),
    ),
  );
  return el(
    "table",
    { role: "table", "aria-label": caption },
    el("thead", { role: "rowgroup" }, head),
    el("tbody", { role: "rowgroup" }, body),
  );
}

const drawn = new WeakMap();

// Draws anew only what changed, and keeps the focus and what was unfolded: a page that is drawn every two seconds
// must not take a keyboard user's place away.
export function redraw(container, data, build) {
  const told = JSON.stringify(data);
  if (drawn.get(container) === told) return;
  drawn.set(container, told);
  const focused = container.contains(document.activeElement)
    ? document.activeElement.dataset.key
    : undefined;
  const unfolded = new Set(
    [...container.querySelectorAll("details[open][data-key]")].map((each) => each.dataset.key),
  );
  container.replaceChildren(...[build(data)].flat(Infinity));
  for (const each of container.querySelectorAll("details[data-key]"))
    if (unfolded.has(each.dataset.key)) each.open = true;
  if (focused) byKey(focused)?.focus({ preventScroll: true });
}

export const byKey = (key) => document.querySelector(`[data-key="${CSS.escape(key)}"]`);

const two = (number) => String(number).padStart(2, "0");
export function clock(moment) {
  const date = new Date(moment);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
export const time = (moment) =>
  el("time", { datetime: moment, title: new Date(moment).toString() }, clock(moment));

export function span(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  return seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
export const number = (value, digits = 1) =>
  Number(value).toLocaleString("en", { maximumFractionDigits: digits });
export const lower = (name, prefix) => (name || "").replace(prefix, "").toLowerCase();
