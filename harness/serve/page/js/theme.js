import { readText, writeText } from "./storage.js";

const KEY = "zinc.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function apply() {
  const chosen = readText(KEY);
  const dark = chosen ? chosen === "dark" : system.matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

apply();
system.addEventListener("change", apply);
document.getElementById("theme")?.addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  writeText(KEY, next);
  apply();
});
