import { readJson, writeJson, writeText } from "./storage.js";

// One entry for each conversation, so that two tabs with different ones do not overwrite each other.
const PREFIX = "zinc.session.";
const TITLE_LENGTH = 60;
// An answer may still be under way in one of them.
const deleted = new Set();

const wellFormed = (session) =>
  session && typeof session.id === "string" && Array.isArray(session.messages)
  && session.messages.every((message) => typeof message?.content === "string");

export function newSession() {
  return { id: newId(), title: "", updated: Date.now(), system: "", messages: [] };
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** All stored conversations, the latest first. */
export function listSessions() {
  let keys = [];
  try {
    keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
  const sessions = keys.map((key) => readJson(key, null)).filter(wellFormed);
  return sessions.sort((a, b) => b.updated - a.updated);
}

/** Keep a conversation, unless it was deleted; false where there is no room for it. */
export function saveSession(session) {
  if (deleted.has(session.id)) return true;
  session.updated = Date.now();
  const first = session.messages.find((message) => message.role === "user");
  session.title = titleOf(first?.content ?? "");
  return writeJson(PREFIX + session.id, session);
}

export function deleteSession(id) {
  deleted.add(id);
  writeText(PREFIX + id, null);
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? line.slice(0, TITLE_LENGTH - 1) + "…" : line;
}
