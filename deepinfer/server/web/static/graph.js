// A small line graph in SVG: the latest SECONDS of one or more series, with a cursor that reads values.

import { make } from "./dom.js";

export const SECONDS = 120;
const WIDTH = 400; // of the drawing; it is scaled to the element's width at each update
const HEIGHT = 150;
const LEFT = 46;
const RIGHT = 6;
const TOP = 8;
const BOTTOM = 20;

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The smallest of 1, 2, 4, 6, 8 times a power of ten that is not below `value`: its half is a short number too. */
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

/** series: [{label, color}]; format(value) gives text; the axis reaches `floor` at least.
 *  Returns {element, update(samples, now)}. */
export function makeGraph({ title, series, format, floor = 0 }) {
  const legend = make("div", { className: "legend" });
  const values = series.map(({ label, color }) => {
    const value = make("b");
    const mark = make("i", { className: `color-${color}` });
    legend.append(make("span", {}, ...(series.length > 1 ? [mark, label, " "] : []), value));
    return value;
  });
  const drawing = svg("svg", { role: "img" });
  const element = make("figure", { className: "graph" }, make("figcaption", {}, make("h2", {}, title), legend), drawing);

  let samples = []; // [{time, values: [number or null]}]
  let now = 0;
  let pointer = null; // x of the mouse in the drawing

  function update(newSamples, newNow) {
    samples = newSamples;
    now = newNow;
    draw();
  }

  function draw() {
    const width = drawing.clientWidth || WIDTH;
    const right = width - RIGHT;
    const bottom = HEIGHT - BOTTOM;
    const highest = Math.max(floor, ...samples.flatMap((sample) => sample.values.map((value) => value ?? 0)));
    const ceiling = niceCeiling(highest);
    const x = (time) => right - ((now - time) / 1000 / SECONDS) * (right - LEFT);
    const y = (value) => bottom - (value / ceiling) * (bottom - TOP);

    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const line = y(ceiling * share);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: right, y1: line, y2: line }));
      parts.push(svg("text", { x: LEFT - 8, y: line + 4, "text-anchor": "end" }, format(ceiling * share)));
    }
    for (const [age, anchor, label] of [[SECONDS, "start", "2 min ago"], [SECONDS / 2, "middle", "1 min"], [0, "end", "now"]]) {
      parts.push(svg("text", { x: x(now - age * 1000), y: HEIGHT - 4, "text-anchor": anchor }, label));
    }
    series.forEach(({ color }, index) => {
      const runs = lines(samples, index, x, y);
      if (series.length === 1) {
        for (const run of runs) {
          const closed = `${path(run)}L${run.at(-1)[0]},${bottom}L${run[0][0]},${bottom}Z`;
          parts.push(svg("path", { class: `area color-${color}`, d: closed }));
        }
      }
      parts.push(svg("path", { class: `color-${color}`, d: runs.map(path).join("") }));
    });
    const shown = pointer === null ? samples.at(-1) : nearest(samples, x, pointer);
    if (pointer !== null && shown) {
      parts.push(svg("line", { class: "cursor", x1: x(shown.time), x2: x(shown.time), y1: TOP, y2: bottom }));
    }
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren(...parts);
    const texts = series.map((_, index) => (shown?.values[index] == null ? "–" : format(shown.values[index])));
    values.forEach((value, index) => { value.textContent = texts[index]; });
    const spoken = series.map(({ label }, index) => `${label} ${texts[index]}`).join(", ");
    drawing.setAttribute("aria-label", `${title}: ${spoken}`);
  }

  drawing.addEventListener("pointermove", (event) => {
    pointer = event.clientX - drawing.getBoundingClientRect().left;
    draw();
  });
  drawing.addEventListener("pointerleave", () => {
    pointer = null;
    draw();
  });
  return { element, update };
}

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

/** Runs of points without a gap between them; a lone point becomes a short dash, so that it can be seen. */
function lines(samples, index, x, y) {
  const runs = [[]];
  for (const { time, values } of samples) {
    if (values[index] === null) runs.push([]);
    else runs.at(-1).push([x(time), y(values[index])]);
  }
  return runs.filter((run) => run.length).map((run) => (run.length > 1 ? run : [run[0], [run[0][0] + 1, run[0][1]]]));
}

function nearest(samples, x, pointer) {
  return samples.reduce(
    (best, sample) => (best && Math.abs(x(best.time) - pointer) <= Math.abs(x(sample.time) - pointer) ? best : sample),
    null,
  );
}
