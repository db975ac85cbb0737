// Line charts of the last hour: one value for each step of time, read with the pointer or the arrow keys.

import { clock, el, number, svg } from "./dom.js";

const HEIGHT = 132;
const EDGE = { left: 46, right: 8, top: 10, bottom: 20 };

function niceTop(values) {
  const most = Math.max(...values, 0);
  if (!most) return 1;
  const step = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((each) => each * step).find((each) => each >= most);
}

// Runs of values: where there is none, the line has a gap.
function runs(values, x, y) {
  const found = [[]];
  values.forEach((value, n) =>
    value === null
      ? found.push([])
      : found.at(-1).push(`${x(n).toFixed(1)},${y(value).toFixed(1)}`),
  );
  return found.filter((run) => run.length).map((run) => (run.length > 1 ? run : [...run, run[0]]));
}

// `series`: [{name, values}], at most two; `times`: the end of each step, in ms since 1970.
export function lineChart({ key, title, unit, series, times, width }) {
  const top = niceTop(series.flatMap((each) => each.values).filter((value) => value !== null));
  const x = (n) =>
    EDGE.left + ((width - EDGE.left - EDGE.right) * n) / Math.max(1, times.length - 1);
  const y = (value) => HEIGHT - EDGE.bottom - (HEIGHT - EDGE.top - EDGE.bottom) * (value / top);
  const at = (n) =>
    `${clock(times[n])}: ` +
    series
      .map(
        ({ name, values }) =>
          `${name} ${values[n] === null ? "–" : `${number(values[n], 2)} ${unit}`}`,
      )
      .join(", ");
  const last = times.length - 1;
  const lines = [0, top / 2, top].flatMap((value) => [
    svg("line", {
      class: "grid",
      x1: EDGE.left,
      x2: width - EDGE.right,
      y1: y(value),
      y2: y(value),
    }),
    svg(
      "text",
      { class: "quiet", x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" },
      number(value, 3),
    ),
  ]);
  const clocks = [
    [0, "start"],
    [Math.floor(last / 2), "middle"],
    [last, "end"],
  ].map(([n, anchor]) =>
    svg(
      "text",
      { class: "quiet", x: x(n), y: HEIGHT - 4, "text-anchor": anchor },
      clock(times[n]).slice(0, 5),
    ),
  );
  const drawn = series.flatMap(({ values }, n) =>
    runs(values, x, y).map((points) =>
      svg("polyline", { class: n ? "second" : "first", points: points.join(" ") }),
    ),
  );
  const cursor = svg("line", {
    class: "cursor",
    y1: EDGE.top,
    y2: HEIGHT - EDGE.bottom,
    x1: x(last),
    x2: x(last),
    opacity: 0,
  });
  const caption = el("figcaption", { "aria-live": "polite" }, at(last));
  const chart = svg(
    "svg",
    {
      class: "chart",
      viewBox: `0 0 ${width} ${HEIGHT}`,
      role: "img",
      tabindex: "0",
      "data-key": key,
      "aria-label": `${title}, the last hour. ${at(last)}. Arrow keys read earlier values.`,
    },
    lines,
    clocks,
    drawn,
    cursor,
  );
  let place = last;
  const show = (n) => {
    place = Math.max(0, Math.min(last, n));
    cursor.setAttribute("x1", x(place));
    cursor.setAttribute("x2", x(place));
    cursor.setAttribute("opacity", 1);
    caption.textContent = at(place);
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * width - EDGE.left;
    show(Math.round((inside / (width - EDGE.left - EDGE.right)) * last));
  });
  chart.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[event.key];
    if (steps === undefined) return;
    event.preventDefault();
    show(place + steps);
  });
  return el(
    "figure",
    {},
    el(
      "h4",
      {},
      `${title}: ${series.map(({ name }, n) => `${n ? "– –" : "——"} ${name}`).join(", ")}`,
    ),
    chart,
    caption,
  );
}
