import { ask } from "./answer.js";
import { getJson, Problem } from "./api.js";

const POLL_MS = 1000;
const MAX_TRIES = 3;

/** Errors after which the same question may simply be asked again. */
export const isBroken = (problem) => problem.kind === "cut" || problem.kind === "unreachable";

export const pause = (milliseconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, milliseconds);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

/** Complete a broken answer once the server is back: the same seed gives the same text, so it is
 * asked for again and goes on where it broke off. Gives "" when it is complete, else why it is
 * not. `waiting` is called while the server is away, `growing` before text is added. Throws
 * AbortError when stopped. */
export async function resume(message, prompt, signal, { waiting, growing, grow, problem }) {
  let reason = problem.message;
  for (let tries = 0; tries < MAX_TRIES; tries++) {
    const before = message.content.length;
    waiting(reason);
    try {
      await serverIsBack(signal);
      return await goOn(message, prompt, signal, { growing, grow });
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      reason = error.message;
      if (!isBroken(error) && error.kind !== "busy") break;
      if (message.content.length > before) tries = -1;
    }
  }
  return reason;
}

async function serverIsBack(signal) {
  for (;;) {
    await pause(POLL_MS, signal);
    signal.throwIfAborted();
    try {
      return await getJson("/v1/models", { signal });
    } catch (error) {
      if (!(error instanceof Problem) || (error.kind !== "unreachable" && error.kind !== "busy")) throw error;
    }
  }
}

async function goOn(message, prompt, signal, { growing, grow }) {
  const shown = message.content;
  const again = { content: "", asked: message.asked };
  const other = new AbortController();
  const compare = () => {
    const length = Math.min(again.content.length, shown.length);
    const same = again.content.slice(0, length) === shown.slice(0, length);
    if (!same) other.abort();
    else if (again.content.length > shown.length) {
      growing();
      Object.assign(message, again);
    }
    if (same) grow();
  };
  try {
    await ask(again, prompt, AbortSignal.any([signal, other.signal]), compare);
  } catch (error) {
    if (!other.signal.aborted) throw error;
  }
  if (other.signal.aborted || again.content.length < shown.length) {
    return "The server gives another answer now, so this one cannot go on.";
  }
  Object.assign(message, again);
  return "";
}
