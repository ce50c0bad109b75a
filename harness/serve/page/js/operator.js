import { getJson, getText } from "./api.js";
import { Chart, compact, sparkline } from "./chart.js";
import { byId, element } from "./dom.js";
import { askForKey } from "./key.js";
import { parseMetrics, total } from "./prometheus.js";

const EVERY_MS = 2000;
const POINTS = 150;
const HISTOGRAM = "inter_token_latency_seconds";

const list = (unit) => (values) => `${compact(values[0] ?? 0)}${unit}`;
const charts = {
  slots: new Chart("Requests in slots", ["running"], POINTS,
    ([running]) => `${running}${slots ? ` of ${slots}` : ""}`),
  queue: new Chart("Queue", ["waiting"], POINTS, ([waiting]) => `${waiting} waiting`),
  tokens: new Chart("Tokens per second", ["generated", "prompt"], POINTS, list(" /s")),
  steps: new Chart("Time per step", ["step", "between tokens"], POINTS, list(" ms")),
  pages: new Chart("KV pages", ["used", "cached", "free"], POINTS,
    ([used, cached, free]) => `${percent(used, used + cached + free)} used`),
  prefix: new Chart("Prompt tokens found in the cache", ["found"], POINTS,
    ([found]) => percent(found, 100)),
};
let slots = null;
let before = null;
/** The latest tokens a second of every tenant. */
const rates = new Map();

const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(0)} %` : "–");

/** What a counter gained each second since the last sample; a restarted server counts from zero. */
function rate(now, name, wanted) {
  const value = total(now.samples, name, wanted);
  if (!before || value === null) return null;
  const gained = value - (total(before.samples, name, wanted) ?? 0);
  return gained < 0 ? null : gained / (now.seconds - before.seconds);
}

/** The mean of what happened since the last sample, in milliseconds. */
function meanMs(part, count) {
  return count > 0 && part !== null ? 1000 * part / count : null;
}

function draw(now) {
  const { samples } = now;
  const running = total(samples, "num_requests_running");
  charts.slots.add([running]);
  charts.queue.add([total(samples, "num_requests_waiting")]);
  charts.tokens.add([rate(now, "generation_tokens_total"), rate(now, "prompt_tokens_total")]);
  const steps = rate(now, "engine_steps_total");
  // Steps run one after the other, so that while anything runs their rate is their time.
  charts.steps.add([running && steps ? 1000 / steps : null,
    meanMs(rate(now, `${HISTOGRAM}_sum`), rate(now, `${HISTOGRAM}_count`))]);
  charts.pages.add(["used", "cached", "free"].map((state) => total(samples, "kv_pages", { state })));
  const asked = rate(now, "prefix_cache_queries_total");
  charts.prefix.add([asked ? 100 * rate(now, "prefix_cache_hits_total") / asked : null]);
  drawTenants(now);
}

function drawTenants(now) {
  const names = new Map();
  for (const { labels } of now.samples) {
    if (labels.tenant) names.set(`${labels.tenant}\n${labels.qos}`, labels);
  }
  const rows = [...names].sort(([, a], [, b]) => a.tenant.localeCompare(b.tenant)).map(
    ([key, { tenant, qos }]) => {
      const who = { tenant, qos };
      const count = (name) => (total(now.samples, name, who) ?? 0).toLocaleString();
      const speed = rate(now, "generation_tokens_total", who);
      const latest = [...(rates.get(key) ?? []), speed].slice(-POINTS);
      rates.set(key, latest);
      return element("tr", {}, ...[tenant, qos ?? "", count("prompt_tokens_total"),
        count("generation_tokens_total"), compact(speed ?? 0),
        sparkline(latest, POINTS, `Tokens per second of ${tenant}`),
        count("tenant_slots"), count("tenant_pages"), count("tenant_live"),
        count("request_success_total"),
      ].map((cell) => element("td", {}, cell)));
    });
  for (const key of rates.keys()) if (!names.has(key)) rates.delete(key);
  byId("tenants").tBodies[0].replaceChildren(...rows);
  byId("tenants").hidden = rows.length === 0;
  byId("no-tenants").hidden = rows.length > 0;
}

function say(state, problem) {
  byId("state").textContent = state;
  byId("banner").textContent = problem;
  byId("banner").hidden = !problem;
}

/** One look at the server; whether to look again. */
async function look() {
  try {
    slots ??= (await getJson("/v1/models")).data[0]?.x_zinc?.slots ?? 0;
    const samples = parseMetrics(await getText("/metrics"));
    const now = { samples, seconds: performance.now() / 1000 };
    draw(now);
    before = now;
    say("live", "");
  } catch (problem) {
    if (!problem.kind) throw problem;
    if (problem.kind === "key") {
      if (await askForKey(problem.message)) return look();
      say("locked", problem.message);
      return false;
    }
    say("not live", `${problem.message} Trying again every few seconds.`);
  }
  return true;
}

async function watch() {
  // Nobody looks at a page in the background, and its clock is slowed there.
  if (document.hidden || await look()) setTimeout(watch, EVERY_MS);
}

byId("charts").append(...Object.values(charts).map((chart) => chart.root));
watch();
