import { speedOf, splitThinking } from "./answer.js";
import { button, copyFrom, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { tokenView } from "./tokens.js";
import { callView } from "./tool-calls.js";

/** A message on the page. `actions` are called with the message's index: edit, regenerate, replay,
 * lock. */
export function userView(message, index, actions) {
  const text = element("div", { className: "bubble" }, message.content);
  return element("article", { className: "user", "aria-label": "You" }, text,
    element("div", { className: "tools" },
      button("Edit", () => actions.edit(index), { className: "plain" }),
      button("Copy", (event) => copyFrom(event.currentTarget, message.content), {
        className: "plain",
      })));
}

/** An answer that grows. */
export class AnswerView {
  constructor(message, index, actions) {
    this.message = message;
    this.index = index;
    this.actions = actions;
    this.thought = element("div", { className: "prose" });
    this.summary = element("summary", {}, "Thinking…");
    this.thinking = element("details", { className: "thinking", hidden: true }, this.summary,
      this.thought);
    this.prose = element("div", { className: "prose" });
    this.calls = element("div", { className: "calls" });
    this.tokens = element("div", { hidden: true });
    this.speed = element("div", { className: "speed quiet" });
    this.below = element("div", { className: "below" });
    this.tools = element("div", { className: "tools" });
    this.root = element("article", { className: "answer", "aria-label": "Answer" },
      this.thinking, this.prose, this.calls, this.tokens, this.speed, this.tools, this.below);
    this.markdown = new MarkdownView(this.prose);
    this.thoughtMarkdown = new MarkdownView(this.thought);
  }

  /** While it streams: at most once a frame. */
  growSoon(frame) {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => { this.scheduled = false; this.grow(); frame(); });
  }

  grow() {
    const { thinking, answer, open } = splitThinking(this.message.content);
    this.thinking.hidden = !thinking;
    if (thinking) {
      this.summary.textContent = open && !this.ended ? "Thinking…" : "Thoughts";
      this.thoughtMarkdown.show(thinking);
    }
    this.markdown.show(answer);
    this.calls.replaceChildren(...(this.message.calls ?? []).map(callView));
    this.root.classList.toggle("waiting", !this.ended && !this.message.content && !this.message.calls);
    this.speed.textContent = speedOf(this.message);
  }

  streaming() {
    this.ended = false;
    this.root.setAttribute("aria-busy", "true");
    this.grow();
  }

  end() {
    this.ended = true;
    this.root.removeAttribute("aria-busy");
    this.grow();
    const { message, index, actions } = this;
    const plain = { className: "plain" };
    const tools = [
      button("Copy", (event) => copyFrom(event.currentTarget, splitThinking(message.content).answer),
        plain),
      button("Regenerate", () => actions.regenerate(index), plain),
    ];
    if (message.asked && message.content) {
      tools.push(button("Replay: same bits", () => actions.replay(index), {
        className: "plain replay", title: "Ask again with the same seed and compare",
      }), button(`Seed ${message.asked.fields.seed}`, () => actions.lock(index), {
        className: "plain seed", title: "Lock this seed",
      }));
    }
    if (message.tokens?.length) tools.push(this.tokensButton());
    if (message.failed) {
      tools.push(element("span", { className: "quiet" }, "Failed: the model does not see this turn"));
    } else if (message.finish === "length") {
      tools.push(element("span", { className: "quiet" }, "Cut by the length limit"));
    } else if (!message.finish && message.content) {
      tools.push(element("span", { className: "quiet" }, "Stopped"));
    }
    this.tools.replaceChildren(...tools);
  }

  tokensButton() {
    const toggle = button("Tokens", () => {
      const shown = this.tokens.hidden;
      if (shown) this.tokens.replaceChildren(tokenView(this.message.tokens));
      this.tokens.hidden = !shown;
      this.prose.hidden = shown;
      toggle.setAttribute("aria-pressed", String(shown));
    }, { className: "plain", "aria-pressed": "false", title: "How likely each token was" });
    return toggle;
  }
}
