const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** The samples of Prometheus' text format: `{name, labels, value}` each. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const parts = line.startsWith("#") ? null : LINE.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\[n"\\]/g, (escape) => ESCAPED[escape]);
    }
    samples.push({ name: parts[1], labels, value: number(parts[3]) });
  }
  return samples;
}

const number = (text) => ({ "+Inf": Infinity, "-Inf": -Infinity })[text] ?? Number(text);

/** The sum of the samples called `name` whose labels hold `wanted`; null where there is none. */
export function total(samples, name, wanted = {}) {
  const fitting = samples.filter((sample) => sample.name === `zinc_rt:${name}`
    && Object.entries(wanted).every(([label, value]) => sample.labels[label] === value));
  return fitting.length ? fitting.reduce((sum, sample) => sum + sample.value, 0) : null;
}
