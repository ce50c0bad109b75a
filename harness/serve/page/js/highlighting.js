import DOMPurify from "../vendor/dompurify.js";
import highlighter from "../vendor/highlight.js";
import bash from "../vendor/languages/bash.js";
import c from "../vendor/languages/c.js";
import cpp from "../vendor/languages/cpp.js";
import css from "../vendor/languages/css.js";
import diff from "../vendor/languages/diff.js";
import go from "../vendor/languages/go.js";
import java from "../vendor/languages/java.js";
import javascript from "../vendor/languages/javascript.js";
import json from "../vendor/languages/json.js";
import markdown from "../vendor/languages/markdown.js";
import python from "../vendor/languages/python.js";
import rust from "../vendor/languages/rust.js";
import sql from "../vendor/languages/sql.js";
import typescript from "../vendor/languages/typescript.js";
import xml from "../vendor/languages/xml.js";
import yaml from "../vendor/languages/yaml.js";

const LANGUAGES = {
  bash, c, cpp, css, diff, go, java, javascript, json, markdown, python, rust, sql, typescript,
  xml, yaml,
};
/** Longer code is shown plain: it is coloured anew at every token. */
const MAX_CHARACTERS = 40_000;
const SPANS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

for (const [name, grammar] of Object.entries(LANGUAGES)) {
  highlighter.registerLanguage(name, grammar);
}

/** The known language that `name` means, or null. */
export function languageOf(name) {
  return name && highlighter.getLanguage(name) ? name : null;
}

/** A fragment with `text` coloured, or the text itself where it is too long. */
export function highlighted(text, language) {
  if (text.length > MAX_CHARACTERS) return text;
  const html = highlighter.highlight(text, { language, ignoreIllegals: true }).value;
  return DOMPurify.sanitize(html, SPANS);
}
