import { readText, writeText } from "./storage.js";

const KEY = "zinc.key";

/** The server's messages begin small and end without a stop. */
const sentence = (text) =>
  text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** Why a request has no answer. `kind` is unreachable, key, busy, cut, full (the conversation is
 * longer than the context) or refused. */
export class Problem extends Error {
  constructor(kind, message, retrySeconds = null) {
    super(sentence(message));
    this.kind = kind;
    this.retrySeconds = retrySeconds;
  }
}

export function setKey(key, keep) {
  writeText(KEY, keep ? key : null);
  writeText(KEY, key, "sessionStorage");
}

function headers() {
  const key = readText(KEY, "sessionStorage") ?? readText(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The response of a request that succeeded; throws Problem, and AbortError when stopped. */
export async function request(path, { body, signal, method } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method: method ?? (body ? "POST" : "GET"),
      headers: body ? { ...headers(), "Content-Type": "application/json" } : headers(),
      body: body && JSON.stringify(body),
      cache: "no-store",
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("unreachable", "The server cannot be reached.");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  let message = `The server answered ${response.status}.`;
  let code = "";
  try {
    const { error } = await response.json();
    message = String(error.message);
    code = error.code;
  } catch { /* not the server's own shape: the status has to do */ }
  if (response.status === 401) return new Problem("key", message);
  if (response.status === 503 || response.status === 429) {
    const seconds = Number(response.headers.get("Retry-After"));
    const again = response.headers.get("x-should-retry") !== "false" && seconds > 0;
    return new Problem("busy", message, again ? Math.min(seconds, 120) : null);
  }
  return new Problem(code === "context_length_exceeded" ? "full" : "refused", message);
}

export const getJson = async (path, options) => (await request(path, options)).json();
export const getText = async (path, options) => (await request(path, options)).text();

/** The chunks of a streamed answer. A stream that ends without `[DONE]` throws Problem "cut". */
export async function* streamChunks(path, body, signal) {
  const response = await request(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Problem("refused", String(chunk.error.message));
        yield chunk;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Problem("cut", "The connection ended before the answer did.");
}
