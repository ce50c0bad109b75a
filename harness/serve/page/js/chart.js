import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 90;

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** A chart of a few series over the last `points` samples, with the latest value in words. */
export class Chart {
  constructor(title, series, points, say) {
    this.title = title;
    this.points = points;
    this.say = say;
    this.values = series.map(() => []);
    this.output = element("output", {}, "–");
    this.most = element("span", {});
    const keys = series.length > 1
      ? series.map((name, index) => element("span", { className: `key series-${index}` }, name)) : [];
    this.svg = shape("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title,
    });
    this.svg.append(shape("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }));
    this.lines = series.map((_, index) => {
      const line = shape("path", { class: `line series-${index}` });
      this.svg.append(line);
      return line;
    });
    this.root = element("figure", {},
      element("figcaption", {}, element("span", {}, title), element("span", {}, ...keys)),
      this.output, this.svg,
      element("figcaption", {}, element("span", {}, "last 5 min"), this.most));
  }

  /** One more sample: a number for each series, or null where there is none. */
  add(sample) {
    this.values.forEach((values, index) => {
      values.push(sample[index]);
      if (values.length > this.points) values.shift();
    });
    const highest = Math.max(0, ...this.values.flat().filter(Number.isFinite));
    this.output.textContent = sample.some(Number.isFinite) ? this.say(sample) : "–";
    this.most.textContent = highest > 0 ? `most ${compact(highest)}` : "";
    this.values.forEach((values, index) => {
      this.lines[index].setAttribute("d", path(values, highest || 1, this.points));
    });
    this.svg.setAttribute("aria-label", `${this.title}: ${this.output.textContent}`);
  }
}

/** A small line of the latest of `values`, as many as a chart has. */
export function sparkline(values, points, label) {
  const svg = shape("svg", {
    class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    "aria-label": label,
  });
  const highest = Math.max(0, ...values.filter(Number.isFinite));
  svg.append(shape("path", { class: "line series-0", d: path(values, highest || 1, points) }));
  return svg;
}

export function compact(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}k`;
  return Number.isInteger(value) || value >= 100 ? value.toFixed(0) : value.toFixed(1);
}

function path(values, highest, points) {
  let drawn = "";
  let pen = false;
  values.forEach((value, index) => {
    if (!Number.isFinite(value)) {
      pen = false;
      return;
    }
    const x = WIDTH * (points - values.length + index) / (points - 1);
    const y = HEIGHT * (1 - value / highest);
    drawn += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = true;
  });
  return drawn;
}
