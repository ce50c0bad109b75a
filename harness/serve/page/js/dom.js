/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element: properties by name, `aria-` and `data-` ones as attributes, then children. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** A button that says `label` and calls `act`. */
export function button(label, act, properties = {}) {
  const made = element("button", { type: "button", ...properties }, label);
  made.addEventListener("click", act);
  return made;
}

/** Tell those who cannot see the page. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Copy to the clipboard, and say so on the button for a moment. */
export async function copyFrom(source, text) {
  const before = source.textContent;
  let told = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    told = "Not allowed";
  }
  source.textContent = told;
  announce(told);
  setTimeout(() => { source.textContent = before; }, 1500);
}
