// The settings panel: kept in localStorage, except the API key, which lives as long as its tab.

import { getKey, setKey } from "./api.js";

const STORE = "deepinfer-settings";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const FIELDS = ["model", "system", "thinking", "tools", ...NUMBERS];
const field = (name) => document.getElementById(name);

/** Fill the form from the store and keep both equal; `onKey` is called when the key was changed. */
export function openSettings(onKey) {
  const form = document.getElementById("settings-form");
  const stored = JSON.parse(localStorage.getItem(STORE) ?? "{}");
  for (const name of FIELDS) if (name !== "model") field(name).value = stored[name] ?? "";
  field("key").value = getKey();
  const save = () => localStorage.setItem(STORE, JSON.stringify(readSettings()));
  form.addEventListener("input", save);
  form.addEventListener("submit", (event) => event.preventDefault());
  field("key").addEventListener("change", () => {
    setKey(field("key").value.trim());
    onKey();
  });
  field("reset").addEventListener("click", () => {
    for (const name of FIELDS) if (name !== "model") field(name).value = "";
    save();
  });
  const panel = field("settings");
  const toggle = field("toggle-settings");
  const show = (visible) => {
    panel.hidden = !visible;
    toggle.setAttribute("aria-expanded", String(visible));
  };
  show(matchMedia("(min-width: 1000px)").matches);
  toggle.addEventListener("click", () => show(panel.hidden));
  return show;
}

export function showModels(models) {
  const chosen = JSON.parse(localStorage.getItem(STORE) ?? "{}").model;
  field("model").replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === chosen)));
}

/** What the form holds, as strings. */
export function readSettings() {
  return Object.fromEntries(FIELDS.map((name) => [name, field(name).value]));
}

/** The fields of a chat request that the settings decide.  Whether values are allowed is the server's to say. */
export function requestFields(settings) {
  const body = { model: settings.model };
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.thinking === "off") body.thinking = { type: "disabled" };
  else if (settings.thinking) body.thinking = { type: "enabled" };
  if (!["", "on", "off"].includes(settings.thinking)) body.reasoning_effort = settings.thinking;
  if (settings.tools.trim()) {
    try {
      body.tools = JSON.parse(settings.tools);
    } catch (error) {
      throw new Error(`The tool definitions in the settings are not JSON: ${error.message}`);
    }
  }
  return body;
}
