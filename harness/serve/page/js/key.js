import { setKey } from "./api.js";
import { byId } from "./dom.js";

/** Ask for an API key; whether one was given. */
export function askForKey(problem) {
  const dialog = byId("key-dialog");
  byId("key-problem").textContent = problem;
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use" && byId("key").value.trim();
      if (given) setKey(given, byId("keep-key").checked);
      resolve(Boolean(given));
    }, { once: true });
  });
}

// Not a submit button: Enter in the field has to mean the other one.
byId("cancel-key").addEventListener("click", () => byId("key-dialog").close("cancel"));
