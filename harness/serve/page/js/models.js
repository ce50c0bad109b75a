import { getJson } from "./api.js";
import { byId, element } from "./dom.js";
import { askForKey } from "./key.js";
import { setUpManager, showManaged } from "./model-manager.js";
import { readText, writeText } from "./storage.js";

const KEY = "zinc.model";
const RETRY_MS = 3000;
let models = [];
let tenant = null;

/** The model that answers, as `/v1/models` describes it. */
export const chosenModel = () => models.find((model) => model.id === byId("model").value);

/** Fill the picker; a server that is not there is waited for. `loaded` is called at the end. */
export async function loadModels(banner, loaded) {
  try {
    const listed = await getJson("/v1/models");
    models = listed.data;
    tenant = listed.x_zinc?.tenant;
    showManaged(listed.x_zinc?.managed, listed.x_zinc?.memory_available_bytes);
  } catch (problem) {
    if (problem.kind === "key" && await askForKey(problem.message)) {
      return loadModels(banner, loaded);
    }
    byId("model").replaceChildren(new Option("No model"));
    if (problem.kind === "unreachable") {
      banner("The server cannot be reached. Trying again every few seconds.", "");
      setTimeout(() => loadModels(banner, loaded), RETRY_MS);
    } else banner(problem.message);
    return undefined;
  }
  byId("banner").hidden = true;
  const select = byId("model");
  select.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  const last = readText(KEY);
  if (models.some((model) => model.id === last)) select.value = last;
  select.onchange = () => { writeText(KEY, select.value); showBadges(); };
  showBadges();
  return loaded();
}

/** The dialog in which models are fetched, chosen and deleted; then the picker is filled again. */
export function setUpModels(banner, loaded) {
  setUpManager((active) => {
    if (active) writeText(KEY, active);
    return loadModels(banner, loaded);
  });
  return loadModels(banner, loaded);
}

function showBadges() {
  const facts = chosenModel()?.x_zinc;
  const badge = (text, title) => element("span", { className: "badge", title }, text);
  const badges = [];
  if (facts?.tier) badges.push(badge(facts.tier, `${facts.device ?? ""}\n${facts.fingerprint ?? ""}`));
  if (tenant?.qos) badges.push(badge(tenant.qos, `How ${tenant.name} is served`));
  byId("badges").replaceChildren(...badges);
}

/** Whether an answer ended because the model's context is full. */
export function isFull(message) {
  const most = chosenModel()?.x_zinc?.context;
  return message.finish === "length" && most > 0 && message.usage?.total_tokens >= most;
}

/** How much of the model's context the conversation has used. */
export function showContext(session) {
  const usage = session.messages.findLast((message) => message.usage)?.usage;
  const most = chosenModel()?.x_zinc?.context;
  byId("context").hidden = !usage;
  if (!usage) return;
  const used = usage.total_tokens;
  byId("context-meter").hidden = !most;
  byId("context-meter").value = most ? used / most : 0;
  byId("context-text").textContent = most
    ? `${used.toLocaleString()} / ${most.toLocaleString()}` : `${used.toLocaleString()} tokens`;
}
