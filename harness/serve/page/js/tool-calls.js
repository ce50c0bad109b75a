import { element } from "./dom.js";

/** `calls` with what a chunk of a stream adds to them. */
export function addCalls(calls, deltas) {
  for (const { index = calls.length, function: part } of deltas) {
    const call = calls[index] ??= { name: "", arguments: "" };
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
  return calls;
}

/** A call, folded: its name, and its arguments laid out as far as they are JSON yet. */
export function callView({ name, arguments: given }) {
  return element("details", { className: "call" },
    element("summary", {}, "Calls ", element("code", {}, name)),
    element("pre", {}, laidOut(given)));
}

function laidOut(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
