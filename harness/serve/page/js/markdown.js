import MarkdownIt from "../vendor/markdown-it.js";
import DOMPurify from "../vendor/dompurify.js";
import { highlighted, languageOf } from "./highlighting.js";
import { button, copyFrom, element } from "./dom.js";

const markdown = new MarkdownIt({ html: false, linkify: true, typographer: false });
// A picture would be fetched from wherever the model says, with what it says in the address.
markdown.disable("image");
for (const rule of ["th_open", "td_open"]) {
  markdown.renderer.rules[rule] = (tokens, index, options, env, self) => {
    const style = tokens[index].attrGet("style");
    if (style) tokens[index].attrs = [["class", style.replace("text-align:", "align-")]];
    return self.renderToken(tokens, index, options);
  };
}

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "a", "ul", "ol",
    "li", "blockquote", "pre", "code", "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

/** Shows Markdown that grows: only the blocks that changed are made anew, so that nothing that is
 * read, selected or scrolled moves. Whatever the text says, it is text. */
export class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.blocks = [];
  }

  show(text) {
    const env = {};
    const lines = text.split("\n");
    const groups = topLevel(markdown.parse(text, env));
    groups.forEach((tokens, index) => {
      const [from, to] = tokens[0].map ?? [0, lines.length];
      const source = lines.slice(from, to).join("\n");
      const known = this.blocks[index];
      if (known?.source === source && known.kind === tokens[0].type) return;
      const html = markdown.renderer.render(tokens, markdown.options, env);
      const node = element("div", { className: "block" }, finished(html));
      if (known) known.node.replaceWith(node);
      else this.parent.append(node);
      this.blocks[index] = { source, kind: tokens[0].type, node };
    });
    for (const gone of this.blocks.splice(groups.length)) gone.node.remove();
  }
}

/** The tokens of each block of the document. */
function topLevel(tokens) {
  const groups = [];
  let current = [];
  for (const token of tokens) {
    current.push(token);
    if (token.level === 0 && token.nesting <= 0) {
      groups.push(current);
      current = [];
    }
  }
  return groups;
}

function finished(html) {
  const fragment = DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", { className: "table", tabIndex: 0 });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) frameCode(code);
  return fragment;
}

function frameCode(code) {
  const text = code.textContent;
  const named = /language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
  const language = languageOf(named);
  code.className = "";
  if (language) code.replaceChildren(highlighted(text, language));
  const copy = button("Copy", () => copyFrom(copy, text), { "aria-label": "Copy this code" });
  const head = element("div", { className: "code-head" }, element("span", {}, named), copy);
  const pre = code.parentElement;
  pre.tabIndex = 0;
  const frame = element("div", { className: "code" });
  pre.replaceWith(frame);
  frame.append(head, pre);
}
