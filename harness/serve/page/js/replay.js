import { ask } from "./answer.js";
import { element } from "./dom.js";

const AROUND = 40;

/** Where two texts part, in characters, or -1 where they are the same. */
export function firstDifference(one, other) {
  const shorter = Math.min(one.length, other.length);
  for (let index = 0; index < shorter; index++) {
    if (one[index] !== other[index]) return index;
  }
  return one.length === other.length ? -1 : shorter;
}

/** How many of the tokens both answers list have another text or probability. */
function differingTokens(one, other) {
  if (!one || !other) return null;
  let differing = 0;
  const shorter = Math.min(one.length, other.length);
  for (let index = 0; index < shorter; index++) {
    const [a, b] = [one[index], other[index]];
    if (a.token !== b.token || a.logprob !== b.logprob) differing++;
  }
  return { differing, compared: shorter };
}

/** Ask again with the same seed; gives an element that says what came of it. An answer that was
 * stopped is replayed as far as it goes. Throws what `ask` throws. */
export async function replay(message, prompt, signal) {
  const partial = !message.finish;
  const again = { content: "", asked: message.asked };
  const enough = new AbortController();
  const either = AbortSignal.any([signal, enough.signal]);
  try {
    await ask(again, prompt, either, () => {
      if (partial && again.content.length >= message.content.length) enough.abort();
    });
  } catch (error) {
    if (!enough.signal.aborted) throw error;
  }
  const compared = partial ? again.content.slice(0, message.content.length) : again.content;
  return verdict(message, { ...again, content: compared });
}

function verdict(message, again) {
  const moved = message.fingerprint && again.fingerprint && message.fingerprint !== again.fingerprint;
  const changed = moved ? " The server's model or arithmetic has changed since." : "";
  const at = firstDifference(message.content, again.content);
  if (at >= 0) {
    return element("div", { className: "verdict differs" },
      element("strong", {}, `Differs from character ${at + 1}.`), changed,
      excerpt("Then", message.content, at), excerpt("Now", again.content, at));
  }
  const tokens = differingTokens(message.tokens, again.tokens);
  if (tokens?.differing) {
    return element("div", { className: "verdict differs" },
      element("strong", {}, "Same text, other probabilities."),
      ` ${tokens.differing} of ${tokens.compared} tokens.${changed}`);
  }
  const also = tokens ? ` and ${tokens.compared} probabilities` : "";
  return element("div", { className: "verdict same" },
    element("strong", {}, "Identical."),
    ` All ${message.content.length} characters${also}, seed ${message.asked.fields.seed}.`);
}

function excerpt(name, text, at) {
  return element("p", {}, element("span", {}, name),
    element("code", {}, text.slice(Math.max(0, at - AROUND), at),
      element("mark", {}, text.slice(at, at + AROUND) || "(ends here)")));
}
