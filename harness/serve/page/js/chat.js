import { addressedId, showAddress } from "./address.js";
import { ask, promptOf } from "./answer.js";
import { Problem } from "./api.js";
import { announce, button, byId, element } from "./dom.js";
import { exportSession } from "./export.js";
import { askForKey } from "./key.js";
import { AnswerView, userView } from "./message-view.js";
import { chosenModel, isFull, setUpModels, showContext } from "./models.js";
import { replay } from "./replay.js";
import { isBroken, pause, resume } from "./resume.js";
import { Scroller } from "./scroller.js";
import { listSessions, newSession, saveSession } from "./sessions.js";
import { buildSettings, isGreedy, lockSeed, requestFields, showSettings } from "./settings.js";
import { setUpSidebar } from "./sidebar.js";

const SUGGESTIONS = [
  "Explain how a hash table works, with a short example",
  "Write a Python function that merges two sorted lists",
  "What should I ask before I rent a flat?",
];
const MAX_RETRIES = 5;

let session = newSession();
let views = [];
let running = null;
const scroller = new Scroller(byId("scroller"), byId("latest"));
const sidebar = setUpSidebar({ open: show, current: () => session });
const actions = { edit, regenerate: answerAnew, replay: replayAnswer, lock: lockOf };

function show(next, address = showAddress) {
  stop();
  session = next;
  views = [];
  byId("messages").replaceChildren();
  session.messages.forEach((message, index) => addView(message, index));
  views.forEach((view) => view.end?.());
  showForgotten();
  address(session);
  showEmpty(!session.messages.length);
  showSettings(session, chosenModel());
  showContext(session);
  sidebar.refresh();
  scroller.toEnd();
  byId("message").focus({ preventScroll: true });
}

/** The stored conversation that the address names, or a new one. */
function addressed() {
  const id = addressedId();
  const found = listSessions().find((stored) => stored.id === id);
  if (id && !found) banner("This browser does not have the conversation of that address.");
  return found ?? newSession();
}

/** A line above the first turn that the model still sees. */
function showForgotten() {
  document.querySelector("#messages .forgotten")?.remove();
  if (!session.from) return;
  views[session.from]?.root.before(
    element("p", { className: "forgotten" }, "The model no longer sees what is above this line."));
}

/** What a conversation without a message shows, which there is nothing to export of. */
function showEmpty(empty) {
  byId("empty").hidden = !empty;
  byId("export").hidden = empty;
}

function addView(message, index) {
  const view = message.role === "user"
    ? { root: userView(message, index, actions) }
    : new AnswerView(message, index, actions);
  views.push(view);
  byId("messages").append(view.root);
  return view;
}

function keep() {
  if (!session.messages.length) return;
  if (!saveSession(session)) {
    banner("This browser keeps no more conversations: delete some, or export this one.");
  }
  showAddress(session, { replace: true });
  sidebar.refresh();
}

/** Forget everything from message `index` on. */
function cutAt(index) {
  session.messages.length = index;
  if (session.from >= index) delete session.from;
  for (const view of views.splice(index)) view.root.remove();
}

function send(text) {
  if (running || !text.trim()) return;
  showEmpty(false);
  session.messages.push({ role: "user", content: text });
  addView(session.messages.at(-1), session.messages.length - 1);
  keep();
  answer();
}

async function answer() {
  const { fields } = requestFields(session, chosenModel());
  const message = {
    role: "assistant", content: "",
    asked: { fields, system: session.system, model: chosenModel()?.id, from: session.from ?? 0 },
  };
  const asking = session;
  asking.messages.push(message);
  const view = addView(message, asking.messages.length - 1);
  view.streaming();
  scroller.toEnd();
  const { system, from } = message.asked;
  const prompt = promptOf(asking.messages.slice(0, view.index), system, from);
  const grow = () => view.growSoon(() => scroller.follow());
  await work(view, (signal) => ask(message, prompt, signal, grow), {
    goOn: (signal, how) => resume(message, prompt, signal, { ...how, grow }),
  });
  view.end();
  if (isFull(message)) {
    view.below.replaceChildren(fullCard("The context is full, so the answer was cut.", view));
  }
  if (!message.content && !message.finish && view.below.childElementCount === 0) {
    // Stopped before the first token: nothing is lost by forgetting it.
    if (asking === session) cutAt(view.index);
    else asking.messages.length = view.index;
  }
  if (asking === session) {
    showContext(session);
    keep();
    scroller.follow();
  } else saveSession(asking);
  announce("The answer is complete");
}

/** Do one thing that can be stopped, with its problems told below `view`. `goOn` completes an
 * answer that broke off; what else is done has none. */
async function work(view, act, { tries = 0, goOn = null } = {}) {
  const stopping = new AbortController();
  running = stopping;
  showRunning();
  view.below.replaceChildren();
  try {
    await act(stopping.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Problem)) throw error;
    await tell(view, error, act, { tries, goOn }, stopping.signal);
  } finally {
    if (running === stopping) running = null;
    showRunning();
  }
}

async function tell(view, problem, act, { tries, goOn }, signal) {
  const again = () => retry(view);
  if (problem.kind === "busy" && problem.retrySeconds && tries < MAX_RETRIES) {
    const text = element("span");
    view.below.replaceChildren(element("div", { className: "problem" }, text));
    for (let left = Math.ceil(problem.retrySeconds); left > 0; left--) {
      text.textContent = `${problem.message} Trying again in ${left} s.`;
      scroller.follow();
      await pause(1000, signal);
      if (signal.aborted) {
        view.below.replaceChildren(problemCard(problem.message, button("Try again", again)));
        return;
      }
    }
    await work(view, act, { tries: tries + 1, goOn });
    return;
  }
  if (problem.kind === "key" && await askForKey(problem.message)) {
    await work(view, act, { tries, goOn });
    return;
  }
  let reason = problem.message;
  if (goOn && isBroken(problem)) {
    reason = await broken(view, problem, goOn, signal);
    if (!reason) return;
  }
  if (goOn) view.message.failed = true;
  view.below.replaceChildren(problem.kind === "full" && goOn
    ? fullCard(reason, view) : problemCard(reason, button("Try again", again)));
  announce(reason);
  scroller.follow();
}

/** Let an answer go on that broke off; why it does not, or "". */
async function broken(view, problem, goOn, signal) {
  const waiting = (text) => {
    view.below.replaceChildren(element("div", { className: "problem" },
      `${text} The answer goes on as soon as the server is back.`));
    scroller.follow();
  };
  try {
    const growing = () => view.below.replaceChildren();
    const reason = await goOn(signal, { waiting, growing, problem });
    if (!reason) growing();
    return reason;
  } catch (error) {
    if (error.name === "AbortError") return problem.message;
    throw error;
  }
}

const problemCard = (text, ...ways) => element("div", { className: "problem", role: "alert" },
  element("span", {}, text), element("div", { className: "row" }, ...ways));

/** What can be done where the conversation is longer than the model's context. */
const fullCard = (text, view) => problemCard(text,
  button("New chat", () => show(newSession())),
  button("Forget the oldest turns", () => forgetOldest(view.index)));

/** Let the model see the later half of the turns only, and answer again. */
function forgetOldest(index) {
  if (running) return;
  const turns = [...session.messages.keys()].filter((at) =>
    at > (session.from ?? 0) && at < index && session.messages[at].role === "user");
  if (!turns.length) {
    banner("This message alone is longer than the context: shorten it, or choose another model.");
    return;
  }
  session.from = turns[Math.floor((turns.length - 1) / 2)];
  regenerate(index);
  showForgotten();
}

/** What the button of a problem does: answer again, or replay again. */
function retry(view) {
  if (view.message.finish) replayAnswer(view.index);
  else regenerate(view.index);
}

/** What the user asks for who wants another answer. */
function answerAnew(index) {
  regenerate(index);
  if (isGreedy(chosenModel())) {
    banner("Temperature 0 gives the same answer each time: raise it in Settings for another one.");
  }
}

function regenerate(index) {
  if (running) return;
  cutAt(index);
  answer();
}

async function replayAnswer(index) {
  if (running) return;
  const view = views[index];
  const message = view.message;
  const { system, from } = message.asked;
  const prompt = promptOf(session.messages.slice(0, index), system, from);
  await work(view, async (signal) => {
    view.below.replaceChildren(element("div", { className: "verdict" }, "Replaying…"));
    scroller.follow();
    try {
      const verdict = await replay(message, prompt, signal);
      view.below.replaceChildren(verdict);
      announce(verdict.textContent);
    } catch (error) {
      view.below.replaceChildren();
      throw error;
    }
    scroller.follow();
  });
}

function lockOf(index) {
  lockSeed(session.messages[index].asked.fields.seed);
  announce("Seed locked");
  openSettings(true);
}

function edit(index) {
  if (running) return;
  const message = session.messages[index];
  const text = element("textarea", { value: message.content, "aria-label": "Edit your message" });
  const view = views[index].root;
  const close = () => editor.replaceWith(view);
  const accept = () => {
    if (!text.value.trim()) return;
    close();
    cutAt(index);
    send(text.value);
  };
  const editor = element("article", { className: "user editing" }, text,
    element("div", { className: "row" },
      button("Cancel", close),
      button("Send", accept, { className: "primary" })));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); close(); }
    if (isSend(event)) { event.preventDefault(); accept(); }
  });
  view.replaceWith(editor);
  text.style.height = `${Math.min(text.scrollHeight + 4, 320)}px`;
  text.focus();
}

const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;
const stop = () => running?.abort();

function showRunning() {
  const label = running ? "Stop" : "Send";
  byId("send").textContent = label;
  byId("send").setAttribute("aria-label", label);
  document.body.classList.toggle("running", running !== null);
}

function banner(text, act = null) {
  byId("banner").replaceChildren(element("span", {}, text),
    act ?? button("Dismiss", () => { byId("banner").hidden = true; }));
  byId("banner").hidden = false;
}

function openSettings(open) {
  byId("settings").hidden = !open;
  byId("open-settings").setAttribute("aria-expanded", String(open));
}

function grow() {
  const box = byId("message");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, 240)}px`;
}

function setUpComposer() {
  const box = byId("message");
  box.addEventListener("input", grow);
  box.addEventListener("keydown", (event) => {
    if (!isSend(event)) return;
    event.preventDefault();
    if (!running) byId("composer").requestSubmit();
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return void stop();
    const text = box.value;
    if (!text.trim()) return;
    box.value = "";
    grow();
    send(text);
  });
  byId("suggestions").append(...SUGGESTIONS.map((text) => button(text, () => send(text))));
}

function setUpKeyboard() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      if (running) stop();
      else if (sidebar.isOpen()) sidebar.close();
      else openSettings(false);
    }
    if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) {
      event.preventDefault();
      show(newSession());
    }
  });
}

setUpComposer();
setUpKeyboard();
buildSettings(() => session, keep);
byId("new-chat").addEventListener("click", () => { show(newSession()); sidebar.close(); });
byId("open-settings").addEventListener("click", () => openSettings(byId("settings").hidden));
byId("close-settings").addEventListener("click", () => openSettings(false));
byId("export").addEventListener("change", ({ target }) => {
  if (session.messages.length) exportSession(session, target.value);
  target.value = "";
});
window.addEventListener("pagehide", keep);
byId("model").addEventListener("change", () => { showSettings(session, chosenModel()); showContext(session); });
show(addressed(), () => {});
window.addEventListener("popstate", () => show(addressed(), () => {}));
setUpModels(banner, () => { showSettings(session, chosenModel()); showContext(session); });
