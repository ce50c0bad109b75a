import { button, byId, element } from "./dom.js";
import { deleteSession, listSessions, newSession } from "./sessions.js";

/** The list of conversations. `open(session)` shows one, `current()` is the one shown. */
export function setUpSidebar({ open, current }) {
  const setOpen = (isOpen) => {
    document.body.classList.toggle("sidebar-open", isOpen);
    byId("scrim").hidden = !isOpen;
  };
  const close = () => setOpen(false);
  byId("open-sidebar").addEventListener("click", () => setOpen(true));
  byId("close-sidebar").addEventListener("click", close);
  byId("scrim").addEventListener("click", close);

  function row(session) {
    const here = session.id === current().id;
    const choose = button(session.title || "Untitled", () => { open(session); close(); }, {
      className: "choose", title: session.title,
    });
    if (here) choose.setAttribute("aria-current", "true");
    const remove = button("×", () => {
      if (remove.dataset.sure !== "yes") {
        // The second click deletes: a slip loses nothing.
        remove.dataset.sure = "yes";
        remove.textContent = "Delete?";
        return;
      }
      deleteSession(session.id);
      if (here) open(newSession());
      else refresh();
    }, { className: "remove", "aria-label": `Delete ${session.title || "conversation"}` });
    remove.addEventListener("blur", () => { delete remove.dataset.sure; remove.textContent = "×"; });
    return element("li", {}, choose, remove);
  }

  function refresh() {
    const sessions = listSessions();
    byId("sessions").replaceChildren(...sessions.map(row));
    byId("no-sessions").hidden = sessions.length > 0;
  }

  // Another tab may have written one.
  window.addEventListener("storage", refresh);
  return { refresh, close, isOpen: () => document.body.classList.contains("sidebar-open") };
}
