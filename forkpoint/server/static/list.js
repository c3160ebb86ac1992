/* The list of conversations that this browser keeps. */

import { $, action, download, element } from "./dom.js";
import { allKept, forget, keep, readKept, readPictures } from "./store.js";
import { readTalk } from "./talks.js";

const NOTHING_KEPT = "Nothing here yet. Conversations are kept in this browser alone.";
const NOTHING_FOUND = "No conversation has these words.";
const DATE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export class TalkList {
  /* `app` has the conversation that is open, `openTalk`, `startOver` and `renamed`. */
  constructor(app) {
    this.app = app;
    this.chosen = null; // id of the row whose actions are shown
    $("open-talks").onclick = () => this.open();
    $("import").onclick = () => $("import-file").click();
    $("import-file").onchange = () => this.import($("import-file").files[0]);
    $("search").oninput = () => this.draw();
  }

  storedElsewhere() {
    if ($("talks").open && !$("talks").contains(document.querySelector(".rename, .sure"))) this.draw();
  }

  open() {
    this.chosen = this.app.talk.id;
    $("search").value = "";
    this.say("");
    this.draw();
    $("talks").showModal();
  }

  say(text) {
    $("talks-note").textContent = text;
    $("talks-note").hidden = !text;
  }

  draw() {
    const words = $("search").value,
      kept = allKept(words);
    $("talks-list").replaceChildren(...kept.map((talk) => this.row(talk)));
    $("talks-none").hidden = kept.length > 0;
    $("talks-none").textContent = words.trim() ? NOTHING_FOUND : NOTHING_KEPT;
  }

  row(talk) {
    const isOpen = talk.id === this.app.talk.id;
    const title = element(
      "button",
      { type: "button", className: "title", onclick: () => this.choose(talk.id), title: talk.name },
      element("span", { textContent: talk.name }),
      element("small", { textContent: talk.changed ? DATE.format(talk.changed) : "" }),
    );
    if (isOpen) title.ariaCurrent = "true";
    const more = action("⋯", () => {
      this.chosen = this.chosen === talk.id ? null : talk.id;
      this.draw();
    });
    more.ariaLabel = `More about ${talk.name}`;
    more.ariaExpanded = String(this.chosen === talk.id);
    const row = element("li", {}, element("div", { className: "row" }, title, more));
    if (this.chosen === talk.id) row.append(this.actions(talk, row));
    return row;
  }

  actions(talk, row) {
    const exported = (kind, type, text) => async () => {
      const found = readKept(talk.id);
      if (!found) return this.say("This conversation cannot be read.");
      await readPictures(found);
      const name = found.name.replace(/[^\p{L}\p{N} ._-]/gu, "").trim().slice(0, 60) || "conversation";
      download(`${name}.${kind}`, type, text(found));
    };
    return element(
      "div",
      { className: "actions" },
      action("Rename", () => this.rename(talk, row)),
      action("Export JSON", exported("json", "application/json", (found) => found.asJSON())),
      action("Export Markdown", exported("md", "text/markdown", (found) => found.asMarkdown())),
      action("Delete", () => this.askToDelete(talk, row)),
    );
  }

  choose(id) {
    const found = readKept(id);
    if (!found) return this.say("This conversation cannot be read.");
    $("talks").close();
    this.app.openTalk(found);
  }

  rename(talk, row) {
    const field = element("input", { value: talk.name, ariaLabel: "New name", maxLength: 200 });
    const form = element("form", { className: "rename" }, field, element("button", { className: "solid", textContent: "Save" }));
    form.onsubmit = (event) => {
      event.preventDefault();
      const found = talk.id === this.app.talk.id ? this.app.talk : readKept(talk.id);
      if (found) {
        found.title = field.value.trim();
        if (!keep(found)) this.say("There is no room to keep the new name: delete a conversation first.");
        this.app.renamed();
      }
      this.draw();
    };
    row.replaceChildren(form);
    field.focus();
    field.select();
  }

  askToDelete(talk, row) {
    const sure = element("button", { className: "solid wrong", type: "button", textContent: "Delete" });
    sure.onclick = () => {
      forget(talk.id);
      this.say("");
      if (talk.id === this.app.talk.id) this.app.startOver();
      this.draw();
    };
    const question = element("p", { textContent: `Delete “${talk.name}” with all its branches?` });
    row.replaceChildren(element("div", { className: "sure" }, question, action("Keep", () => this.draw()), sure));
    sure.focus();
  }

  async import(file) {
    $("import-file").value = "";
    if (!file) return;
    try {
      const talk = readTalk(await file.text());
      const lost = () => this.say("There is no room for its images: delete a conversation first.");
      if (!keep(talk, lost)) return this.say("There is no room for it: delete a conversation first.");
      this.chosen = talk.id;
      this.say("");
      this.draw();
    } catch (error) {
      this.say(`${file.name}: ${error.message}.`);
    }
  }
}
