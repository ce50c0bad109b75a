import { byId, element } from "./dom.js";
import { readJson, writeJson } from "./storage.js";

const KEY = "zinc.settings";
const SEEDS = 2 ** 31;

/** What may be set: `low`, `high` and `step` of a number; an empty one is left to the server. */
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.05,
    "0 always takes the likeliest token; higher is more varied"],
  ["top_p", "Top p", 0, 1, 0.01,
    "Draw among the likeliest that have this probability together; 1 is off"],
  ["top_k", "Top k", 0, 1000, 1, "Draw among this many of the likeliest; 0 is off"],
  ["min_p", "Min p", 0, 1, 0.01,
    "Drop those less probable than this share of the likeliest; 0 is off"],
  ["repetition_penalty", "Repetition penalty", 0.1, 2, 0.05, "Above 1 repeats less; 1 is off"],
  ["max_tokens", "Longest answer", 1, 1_000_000, 1, "In tokens, of about four letters each"],
];

/** The server's names of its defaults, where they are not those of the request's fields. */
const SERVER_NAMES = { repetition_penalty: "repeat_penalty" };

export const drawSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] % SEEDS;

const settings = { values: {}, seed: drawSeed(), locked: false, logprobs: false, thinking: "" };
const stored = readJson(KEY, {});
for (const name of Object.keys(settings)) {
  if (typeof stored[name] === typeof settings[name] && stored[name] !== null) {
    settings[name] = stored[name];
  }
}

const save = () => writeJson(KEY, settings);
const changed = [];
/** `listener` is called when the seed is locked, freed, or changed. */
export const onSeedChange = (listener) => changed.push(listener);

export const isLocked = () => settings.locked;

/** Answer with this seed from now on; null draws one for each answer. */
export function lockSeed(seed) {
  settings.locked = seed !== null;
  if (seed !== null) settings.seed = seed;
  save();
  showSeed();
}

/** Whether the same question has the same answer with every seed. */
export function isGreedy(model) {
  return (settings.values.temperature ?? model?.x_zinc?.sampling?.temperature) === 0;
}

/** The fields of a request that the settings decide, with a seed always, so that every answer can
 * be replayed. */
export function requestFields(session, model) {
  const fields = {};
  for (const [name, , low, high] of NUMBERS) {
    const value = settings.values[name];
    if (Number.isFinite(value) && value >= low && value <= high) fields[name] = value;
  }
  fields.seed = settings.locked ? settings.seed : drawSeed();
  if (settings.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  if (model?.x_zinc?.thinking && settings.thinking) {
    fields.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  }
  return { fields, system: session.system };
}

/** Build the form. `session()` is the conversation the system prompt belongs to. */
export function buildSettings(session, keep) {
  const form = byId("settings-form");
  const system = element("textarea", { id: "system", rows: 5, placeholder: "You are …" });
  system.addEventListener("change", () => { session().system = system.value.trim(); keep(); });
  form.append(labelled("System prompt", system, "For this conversation"));
  for (const row of NUMBERS) form.append(numberField(row));
  const thinking = element("select", { id: "thinking" },
    new Option("As the model likes", ""), new Option("On", "on"), new Option("Off", "off"));
  thinking.value = settings.thinking;
  thinking.addEventListener("change", () => { settings.thinking = thinking.value; save(); });
  const row = labelled("Thinking", thinking);
  row.id = "thinking-row";
  form.append(row, seedField(), logprobsField());
  form.addEventListener("submit", (event) => event.preventDefault());
}

/** Show what belongs to this conversation and model: also what a number is that is left out. */
export function showSettings(session, model) {
  const usual = model?.x_zinc?.sampling ?? {};
  for (const [name] of NUMBERS) {
    const value = usual[SERVER_NAMES[name] ?? name];
    byId(name).placeholder = value === undefined ? "default" : `default: ${value}`;
  }
  byId("system").value = session.system;
  byId("thinking-row").hidden = !model?.x_zinc?.thinking;
}

function labelled(text, control, hint = "") {
  const label = element("label", {}, element("span", {}, text), control);
  if (hint) label.append(element("small", {}, hint));
  return label;
}

function numberField([name, text, low, high, step, hint]) {
  const input = element("input", {
    type: "number", id: name, min: low, max: high, step, placeholder: "default",
  });
  input.value = settings.values[name] ?? "";
  input.addEventListener("change", () => {
    if (input.value === "" || !input.checkValidity()) {
      // An out-of-range number is shown as such, and not sent.
      delete settings.values[name];
    } else settings.values[name] = input.valueAsNumber;
    save();
  });
  return labelled(text, input, hint);
}

function seedField() {
  const lock = element("input", { type: "checkbox", id: "seed-lock" });
  const seed = element("input", { type: "number", id: "seed", min: 0, max: SEEDS - 1, step: 1 });
  lock.addEventListener("change", () => lockSeed(lock.checked ? settings.seed : null));
  seed.addEventListener("change", () => {
    if (seed.value !== "" && seed.checkValidity()) lockSeed(seed.valueAsNumber);
    else showSeed();
  });
  const field = element("fieldset", {}, element("legend", {}, "Seed"),
    element("label", { className: "check" }, lock, "Lock the seed"),
    element("label", { className: "visually-hidden", htmlFor: "seed" }, "Seed"), seed,
    element("small", {}, "Same seed, same conversation: the same answer, bit for bit."));
  setTimeout(showSeed);
  return field;
}

function showSeed() {
  byId("seed-lock").checked = settings.locked;
  byId("seed").value = settings.seed;
  changed.forEach((listener) => listener());
}

function logprobsField() {
  const input = element("input", { type: "checkbox", id: "logprobs", checked: settings.logprobs });
  input.addEventListener("change", () => { settings.logprobs = input.checked; save(); });
  return element("label", { className: "check" }, input, "Keep the probability of every token");
}
