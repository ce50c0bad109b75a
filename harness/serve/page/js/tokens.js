import { element } from "./dom.js";

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100 %" : value >= 0.1 ? `${value.toFixed(1)} %` : "< 0.1 %";
};
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

/** The tokens of an answer, shaded by how unlikely each was; hovering or focusing one shows its
 * probability and what else might have come. */
export function tokenView(tokens) {
  const card = element("div", { className: "token-card", role: "tooltip", hidden: true });
  const text = element("div", { className: "token-text" });
  const view = element("div", { className: "token-view" }, text, card);
  tokens.forEach((token, index) => {
    const shade = Math.min(4, Math.floor(-(token.logprob ?? 0)));
    text.append(element("span", {
      className: `token shade-${shade}`, tabIndex: index ? -1 : 0, "data-index": index,
      "aria-label": `${token.token} ${token.logprob === null ? "" : percent(token.logprob)}`,
    }, token.token));
  });
  const show = (event) => {
    const over = event.target.closest(".token");
    if (!over) return;
    card.replaceChildren(...rows(tokens[over.dataset.index]));
    card.hidden = false;
    const most = view.clientWidth - card.offsetWidth;
    card.style.left = `${Math.max(0, Math.min(over.offsetLeft, most))}px`;
    card.style.top = `${over.offsetTop + over.offsetHeight + 4}px`;
  };
  const hide = () => { card.hidden = true; };
  text.addEventListener("mouseover", show);
  text.addEventListener("focusin", show);
  text.addEventListener("mouseleave", hide);
  text.addEventListener("focusout", hide);
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step === 1 ? event.target.nextElementSibling
      : step && event.target.previousElementSibling;
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return view;
}

function rows(token) {
  const others = (token.top_logprobs ?? []).filter((other) => other.token !== token.token);
  return [token, ...others].map((one, index) => element("div", { className: index ? "" : "taken" },
    element("code", {}, visible(one.token)),
    element("span", {}, one.logprob === null ? "–" : percent(one.logprob))));
}
