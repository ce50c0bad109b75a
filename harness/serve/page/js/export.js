import { element } from "./dom.js";

/** Save a conversation as a file: "markdown" or "json". */
export function exportSession(session, format) {
  const json = format === "json";
  const text = json ? JSON.stringify(session, null, 2) : asMarkdown(session);
  const type = json ? "application/json" : "text/markdown";
  const url = URL.createObjectURL(new Blob([text], { type }));
  const name = (session.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60);
  element("a", { href: url, download: `${name}.${json ? "json" : "md"}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function asMarkdown(session) {
  const parts = [`# ${session.title}`];
  if (session.system) parts.push("## System", session.system);
  for (const message of session.messages) {
    parts.push(message.role === "user" ? "## You" : "## Answer", message.content);
    if (message.asked) parts.push(`*Seed ${message.asked.fields.seed}*`);
  }
  return parts.join("\n\n") + "\n";
}
