import { streamChunks } from "./api.js";
import { addCalls } from "./tool-calls.js";

/** What came in less than this came at once, and has no speed. */
const SHORTEST_SECONDS = 0.05;

/** Whether an answer failed: then its turn is not part of the conversation. */
const isFailed = (message) => message?.role === "assistant"
  && (message.failed || (!message.content && !message.calls?.length));

/** The messages before an answer, as the API takes them: without failed turns, without what the
 * model thought, and without the turns before message `from`, which are forgotten. */
export function promptOf(messages, system, from = 0) {
  const turns = messages
    .filter((message, index) =>
      index >= from && !isFailed(message) && !isFailed(messages[index + 1]))
    .map(({ role, content }) => ({ role, content: withoutThinking(content) }));
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

/** `text` as what the model thought and what it answers; `open` while it still thinks. */
export function splitThinking(text) {
  const start = /^\s*<think>/.exec(text);
  if (!start) return { thinking: "", answer: text, open: false };
  const end = text.indexOf("</think>");
  if (end < 0) return { thinking: text.slice(start[0].length), answer: "", open: true };
  return {
    thinking: text.slice(start[0].length, end).trim(),
    answer: text.slice(end + "</think>".length).trimStart(),
    open: false,
  };
}

const withoutThinking = (text) => splitThinking(text).answer;

/** Ask, and call `grow(message)` as the answer comes. `message` is filled in: content, tokens,
 * usage, times in milliseconds. Throws what `streamChunks` throws. */
export async function ask(message, prompt, signal, grow) {
  const { fields, model } = message.asked;
  const body = {
    ...fields, messages: prompt, stream: true, stream_options: { include_usage: true },
  };
  if (model) body.model = model;
  const began = performance.now();
  let reasoning = false;
  for await (const chunk of streamChunks("/v1/chat/completions", body, signal)) {
    const now = performance.now();
    if (chunk.system_fingerprint) message.fingerprint = chunk.system_fingerprint;
    if (chunk.usage) message.usage = chunk.usage;
    if (chunk.x_zinc) message.zinc = chunk.x_zinc;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    if (choice.finish_reason) message.finish = choice.finish_reason;
    if (choice.logprobs?.content) (message.tokens ??= []).push(...choice.logprobs.content);
    if (choice.delta?.tool_calls) {
      message.calls = addCalls(message.calls ?? [], choice.delta.tool_calls);
      message.firstMs ??= now - began;
      message.totalMs = now - began;
      grow(message);
    }
    const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    let text = choice.delta?.content ?? "";
    if (thought) {
      text = (reasoning ? "" : "<think>") + thought;
      reasoning = true;
    } else if (text && reasoning) {
      text = "</think>" + text;
      reasoning = false;
    }
    if (!text) continue;
    message.firstMs ??= now - began;
    message.pieces = (message.pieces ?? 0) + 1;
    message.content += text;
    message.totalMs = now - began;
    grow(message);
  }
}

/** "12.3 tokens/s · first token 85 ms · 240 tokens", as far as it is known. */
export function speedOf(message) {
  if (message.firstMs === undefined) return "";
  const tokens = message.usage?.completion_tokens ?? message.pieces;
  const seconds = (message.totalMs - message.firstMs) / 1000;
  const parts = [];
  if (tokens > 1 && seconds > SHORTEST_SECONDS) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  const first = message.firstMs;
  parts.push(`first token ${first < 1000 ? `${first.toFixed(0)} ms` : `${(first / 1000).toFixed(1)} s`}`);
  if (message.usage) parts.push(`${tokens} tokens`);
  return parts.join(" · ");
}
