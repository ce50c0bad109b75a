// Storage may be forbidden, full, or hold what another version wrote: the page works without it.

export function readText(key, storage = "localStorage") {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}

/** Whether it was written. */
export function writeText(key, text, storage = "localStorage") {
  try {
    if (text === null) window[storage].removeItem(key);
    else window[storage].setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

export function readJson(key, otherwise) {
  try {
    return JSON.parse(readText(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export const writeJson = (key, value) => writeText(key, JSON.stringify(value));
