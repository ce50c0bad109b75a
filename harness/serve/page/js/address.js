/** The id of the conversation that the page's address names, "" where it names none. */
export const addressedId = () => new URLSearchParams(location.hash.slice(1)).get("chat") ?? "";

const addressOf = (session) =>
  session.messages.length ? `${location.pathname}#chat=${session.id}` : location.pathname;

/** Put the conversation into the address: as a new entry of the history, or in place of this one. */
export function showAddress(session, { replace = false } = {}) {
  const address = addressOf(session);
  if (address === location.pathname + location.hash) return;
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
}
