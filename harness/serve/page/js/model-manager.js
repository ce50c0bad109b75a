import { getJson, request, streamChunks } from "./api.js";
import { announce, button, byId, element } from "./dom.js";

const UNITS = ["B", "kB", "MB", "GB", "TB"];
const pulls = new Map();
let managed = [];
let available = null;
let changed = () => {};

/** "1.2 GB". */
export function sizeOf(bytes) {
  let unit = 0;
  let value = bytes;
  while (value >= 1000 && unit < UNITS.length - 1) { value /= 1000; unit++; }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** Prepare the dialog; `reload(active)` fills the picker again, after another model was chosen. */
export function setUpManager(reload) {
  changed = reload;
  const dialog = byId("models-dialog");
  byId("open-models").addEventListener("click", () => { problem(""); dialog.showModal(); });
  byId("close-models").addEventListener("click", () => dialog.close());
  byId("pull-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = byId("pull-name").value.trim();
    if (!name) return;
    byId("pull-name").value = "";
    pull(name);
  });
}

/** What the server has, and what it could fetch; nothing where it does not say. `memory` is how
 * many bytes it has free, where it knows. */
export function showManaged(models, memory) {
  managed = models ?? [];
  available = memory ?? null;
  byId("open-models").hidden = !models;
  // Others fetch too: their progress is watched as ours is.
  for (const { id, pull: state } of managed) if (state && !pulls.has(id)) pull(id);
  draw();
}

function problem(text) {
  byId("models-problem").textContent = text;
  byId("models-problem").hidden = !text;
}

function draw() {
  const known = new Set(managed.map(({ id }) => id));
  const coming = [...pulls.keys()].filter((id) => !known.has(id)).map((id) => ({ id }));
  byId("managed").replaceChildren(...[...managed, ...coming].map(row));
}

function row(model) {
  const facts = [model.parameters, model.quant, model.size_bytes && sizeOf(model.size_bytes)];
  const need = model.memory_bytes;
  if (need) facts.push(`takes about ${sizeOf(need)} of memory`);
  const fits = !need || available === null || model.active || need <= available;
  const room = fits ? [] : [element("span", { className: "no-room" },
    `Does not fit: the server has ${sizeOf(available)} free`)];
  const pulling = pulls.get(model.id);
  return element("li", {},
    element("div", { className: "what" },
      element("strong", {}, model.id),
      element("span", { className: "quiet" }, facts.filter(Boolean).join(" · ")),
      ...room,
      ...(pulling ? [pulling.bar, pulling.told] : [])),
    ...actionsOf(model));
}

/** How far a pull is, where it is shown: told anew without anything else being drawn anew. */
function newProgress() {
  return {
    bar: element("progress", { max: 1, "aria-label": "Fetched" }),
    told: element("span", { className: "quiet" }, "waiting"),
    show({ status, completed, total }) {
      if (total) this.bar.value = completed / total;
      else this.bar.removeAttribute("value");
      this.told.textContent = total
        ? `${status}, ${sizeOf(completed)} of ${sizeOf(total)}` : status;
    },
  };
}

function actionsOf(model) {
  if (pulls.has(model.id)) {
    return [button("Give up", () => act(model.id, () => remove(model.id)))];
  }
  if (model.active) return [element("span", { className: "badge" }, "answers")];
  if (!model.installed) return [button("Fetch", () => pull(model.id))];
  const deleting = button("Delete", () => {
    if (deleting.dataset.sure !== "yes") {
      // The second click deletes: a slip loses nothing.
      deleting.dataset.sure = "yes";
      deleting.textContent = "Delete?";
    } else act(model.id, () => remove(model.id));
  }, { className: "plain" });
  return [deleting, button("Use", () => act(model.id, () => use(model.id)), { className: "primary" })];
}

const remove = (id) => request(`/v1/models/${encodeURI(id)}`, { method: "DELETE" });

async function use(id) {
  announce(`Opening ${id}`);
  await getJson("/v1/models/activate", { body: { model: id } });
  return id;
}

/** Do something with a model, tell what went wrong, and look again. */
async function act(id, work) {
  problem("");
  try {
    await changed(await work() === id ? id : null);
  } catch (error) {
    problem(error.message);
  }
}

/** Fetch a model, or watch who does. */
async function pull(id) {
  problem("");
  const progress = newProgress();
  pulls.set(id, progress);
  draw();
  try {
    for await (const state of streamChunks("/v1/models/pull", { model: id, stream: true })) {
      progress.show(state);
    }
    announce(`${id} is there`);
  } catch (error) {
    problem(`${id}: ${error.message}`);
  } finally {
    pulls.delete(id);
    draw();
  }
  await changed(null);
}
