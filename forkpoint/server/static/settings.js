/* The settings and their dialog. They stay in the browser, the key only as long as the tab. */

import { $ } from "./dom.js";
import { load, save } from "./store.js";

/* Numbers, by the id of their field. Null leaves the choice to the server. */
const NUMBERS = {
  temperature: "temperature",
  "top-p": "topP",
  "top-k": "topK",
  seed: "seed",
  "max-tokens": "maxTokens",
};

export class Settings {
  constructor() {
    this.values = {
      temperature: null,
      topP: null,
      topK: null,
      seed: null,
      maxTokens: null,
      stop: [],
      theme: "light dark",
      system: "",
      ...load("localStorage", "settings", {}),
    };
    this.apiKey = load("sessionStorage", "key", "");
    this.applyTheme();
  }

  change(values) {
    Object.assign(this.values, values);
    save("localStorage", "settings", this.values);
  }

  applyTheme() {
    document.documentElement.style.colorScheme = this.values.theme;
  }

  open() {
    $("key").value = this.apiKey;
    for (const [id, name] of Object.entries(NUMBERS)) $(id).value = this.values[name] ?? "";
    $("stop").value = this.values.stop.map((text) => text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n")).join("\n");
    for (const radio of document.getElementsByName("theme")) radio.checked = radio.value === this.values.theme;
    $("settings").returnValue = "";
    $("settings").showModal();
  }

  /* Takes over what the dialog says, unless it was cancelled; whether the key changed. */
  close() {
    if ($("settings").returnValue !== "save") return false;
    const number = (id) => ($(id).value === "" ? null : Number($(id).value));
    const numbers = Object.entries(NUMBERS).map(([id, name]) => [name, number(id)]);
    const lines = $("stop").value.split("\n").filter(Boolean);
    this.change({
      ...Object.fromEntries(numbers),
      stop: lines.map((line) => line.replace(/\\([n\\])/g, (_, sign) => (sign === "n" ? "\n" : "\\"))),
      theme: [...document.getElementsByName("theme")].find((radio) => radio.checked).value,
    });
    const before = this.apiKey;
    this.apiKey = $("key").value.trim();
    save("sessionStorage", "key", this.apiKey);
    this.applyTheme();
    return before !== this.apiKey;
  }
}
