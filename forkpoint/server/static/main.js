/* Where the conversation stands, and what a person can do with it. */

import { $, action, element } from "./dom.js";
import { TalkList } from "./list.js";
import { AnswerView, messageView, idle } from "./messages.js";
import { ServerError, request, requestFields, streamAnswer } from "./server.js";
import { Pictures } from "./pictures.js";
import { Settings } from "./settings.js";
import { BEAT_MS, forgetNode, interrupt, isLost, keep, keepInterrupted, load, readKept, readKey, readPictures, save } from "./store.js";
import { Talk, withPictures } from "./talks.js";

const model = $("model"),
  input = $("input"),
  send = $("send"),
  messagesView = $("messages"),
  banner = $("banner");
const SMALL_MODEL = "forkpoint-small"; // the demo model of a checkout
const OPENINGS = [
  "My name is Nora. My lucky number is 42.",
  "Keep a total for Ben. It starts at 30. Answer after each move.",
  "What can you do?",
];
const LONG_DRAWING_MS = 20;
const SAVE_MS = 400; // between two writes of an answer that grows
const LEAVING_MS = 3000; // after which the page has stayed
const RETRY_MS = 2000; // between two requests to a server that is not ready
const FULL =
  "The browser's room for conversations is full: what is new here is not kept. Export this conversation, or delete others.";

class App {
  constructor() {
    this.settings = new Settings();
    const id = load("sessionStorage", "talk", null);
    this.talk = (id && readKept(id)) || Talk.start(this.settings.values.system);
    this.editing = null; // id of the message that is being edited
    this.running = null; // the AbortController of the answer that this tab receives
    this.growing = null; // {talk, node} of that answer
    this.hasLost = false; // whether images could not be kept
    this.leavingUntil = 0;
    this.retryTimer = 0;
    this.answers = new WeakMap(); // node: its view, so that no answer is read twice
    this.openSettings = () => this.settings.open();
    this.cancelEdit = () => this.#edited(null);
  }

  get tree() {
    return this.talk.tree;
  }

  /* ---- What is on the screen ---- */

  render() {
    const path = this.tree.path(),
      follow = isAtEnd();
    messagesView.replaceChildren(...path.map((node) => messageView(node, this)));
    if (path.length === 1 && this.editing === null) messagesView.append(this.welcome());
    for (const button of messagesView.querySelectorAll("[data-idle]")) button.disabled = this.running !== null;
    messagesView.querySelector(".editor textarea")?.focus();
    this.updateSend();
    if (follow) scrollToEnd();
  }

  answerView(node) {
    if (!this.answers.has(node)) this.answers.set(node, new AnswerView(node, this));
    return this.answers.get(node);
  }

  welcome() {
    return element(
      "div",
      { className: "welcome" },
      element("strong", { textContent: "What would you like to ask?" }),
      "Edit any message to branch from it. What the branches share is not computed again.",
      ...(model.value === SMALL_MODEL ? this.openings() : []),
    );
  }

  /* What the small model understands: it is trained on sentences such as these alone. */
  openings() {
    return [
      element("span", {
        className: "about",
        textContent: "This small model remembers what it is told, follows corrections and keeps totals:",
      }),
      ...OPENINGS.map((text) => idle(action(text, () => this.ask(text)))),
    ];
  }

  updateSend() {
    send.textContent = this.running ? "Stop" : "Send";
    send.classList.toggle("stop", this.running !== null);
    const isEmpty = !input.value.trim() && pictures.isEmpty;
    send.disabled = this.running === null && (isEmpty || pictures.reading > 0 || !model.value);
  }

  changed() {
    this.keep(this.talk);
    this.render();
  }

  /* A conversation is kept from its first question on. */
  keep(talk) {
    if (talk === this.talk) save("sessionStorage", "talk", talk.isEmpty ? null : talk.id);
    if (!talk.isEmpty) $("full").hidden = keep(talk, () => this.lost()) && !this.hasLost;
  }

  /* The browser had no room for images. */
  lost() {
    this.hasLost = true;
    $("full").hidden = false;
  }

  /* Shows the images of a conversation that was read. */
  async showPictures(talk) {
    if ((await readPictures(talk)) && talk === this.talk) this.#renderUnlessEditing();
  }

  renamed() {
    document.title = this.talk.isEmpty ? "forkpoint" : `${this.talk.name} · forkpoint`;
  }

  /* ---- Questions and answers ---- */

  ask(text, images = []) {
    let last = this.tree.path().at(-1);
    // While another tab receives an answer, a question here is a branch beside that answer's question.
    if (last.streaming) last = this.tree.get(this.tree.get(last.parent).parent);
    this.answer(this.tree.add(last.id, { role: "user", content: text, ...withPictures(images) }));
    scrollToEnd();
  }

  answer(question) {
    const sent = requestFields(model.value, this.settings.values);
    const node = this.tree.add(question.id, { role: "assistant", content: "", reasoning: "", sent });
    return this.#receive(node, question);
  }

  /* Goes on with an answer that ended early. */
  continueAnswer(node) {
    if (this.running) return;
    for (const name of ["stopped", "interrupted", "error", "finish", "figures"]) delete node[name];
    node.sent = { ...requestFields(model.value, this.settings.values), continue_final_message: true };
    node.continuedAt = node.content.length;
    this.answers.delete(node); // its last block may grow again
    this.#receive(node, node);
  }

  /* Receives the answer `node` to all messages up to `last`. */
  async #receive(node, last) {
    const { talk } = this;
    const running = (this.running = new AbortController());
    node.streaming = true;
    this.growing = { talk, node };
    talk.tree.changed(node);
    this.changed();
    this.renamed();
    announce("Waiting for the answer");
    const drawing = new Drawing(() => {
      const follow = isAtEnd();
      this.answerView(node).draw();
      if (follow) scrollToEnd();
    });
    let savedAt = performance.now();
    const grew = () => {
      drawing.ask();
      if (performance.now() - savedAt < SAVE_MS) return;
      this.#keepGrowing();
      savedAt = performance.now();
    };
    const beat = setInterval(() => this.#keepGrowing(), BEAT_MS);
    try {
      await readPictures(talk);
      await streamAnswer(node, talk.tree.messagesTo(last), this.settings.apiKey, running.signal, grew);
      announce("The answer is complete");
    } catch (error) {
      if (error.name === "AbortError") node.stopped = true;
      else if (performance.now() < this.leavingUntil) node.interrupted = true; // the browser ended the request
      else
        node.error = {
          message: error instanceof ServerError ? error.message : `The answer cannot be read (${error.message}).`,
          status: error.status,
        };
      announce(node.stopped ? "Stopped" : "");
    } finally {
      clearInterval(beat);
      drawing.end();
      node.streaming = false;
      talk.tree.changed(node);
      if (this.running === running) this.running = this.growing = null;
      if (readKept(talk.id) || talk === this.talk) this.keep(talk); // unless it was deleted meanwhile
      this.render();
    }
  }

  #keepGrowing() {
    if (!this.growing) return;
    const { talk, node } = this.growing;
    talk.tree.changed(node);
    this.keep(talk);
  }

  /* The page is about to go. A browser says so for links that start a download or a mail, too. */
  leave() {
    this.leavingUntil = performance.now() + LEAVING_MS;
    if (this.growing) keepInterrupted(this.growing.talk, this.growing.node);
  }

  stop() {
    this.running?.abort();
  }

  retry(node) {
    if (this.running) return;
    const question = this.tree.get(node.parent);
    if (node.error && !node.content && !node.children.length) {
      this.tree.remove(node);
      forgetNode(this.talk, node);
    }
    this.answer(question);
  }

  /* ---- Edits and branches ---- */

  edit(node) {
    if (!this.running) this.#edited(node.id);
  }

  #edited(id) {
    this.editing = id;
    this.render();
    if (id === null) input.focus();
  }

  isChangeable(node) {
    return node.role === "system" && !node.children.length;
  }

  finishEdit(node, text) {
    if (this.running || (node.role === "user" && !text.trim() && !node.pictures && !node.images)) return;
    this.editing = null;
    input.focus();
    if (node.role === "system") this.settings.change({ system: text });
    if (text === node.content && node.role !== "user") return this.changed();
    if (this.isChangeable(node)) {
      node.content = text;
      this.tree.changed(node);
      return this.changed();
    }
    const made = this.tree.add(node.parent, { role: node.role, content: text, images: node.images, pictures: node.pictures, edited: true });
    if (node.role === "user") return void this.answer(made);
    if (node.role === "system") input.value ||= this.tree.get(node.active)?.content ?? "";
    this.changed();
  }

  choose(id, label) {
    this.tree.choose(id);
    this.editing = null;
    this.changed();
    const around = messagesView.querySelector(`[data-id="${id}"]`);
    const same = [...(around?.querySelectorAll(".branches button") ?? [])].find(
      (button) => button.ariaLabel === label && !button.disabled,
    );
    (same ?? around?.querySelector(".branches button:not(:disabled)") ?? input).focus();
  }

  /* ---- Conversations ---- */

  /* What was there stays in the list. */
  startOver() {
    this.openTalk(Talk.start(this.settings.values.system));
  }

  openTalk(talk) {
    this.stop();
    this.running = this.growing = null;
    this.editing = null;
    this.talk = talk;
    save("sessionStorage", "talk", talk.isEmpty ? null : talk.id);
    this.render();
    this.showPictures(talk);
    this.renamed();
    scrollToEnd();
    input.focus();
  }

  /* Another tab stored or deleted a record. */
  storedElsewhere(key, text) {
    const place = readKey(key);
    if (place?.talkId !== this.talk.id) return;
    const { tree } = this;
    if (!place.nodeId) {
      if (text) this.talk.title = JSON.parse(text).title ?? "";
      else for (const node of tree.nodes.values()) if (node.id !== "root") tree.changed(node); // deleted: kept if it goes on here
      return this.renamed();
    }
    const known = tree.get(place.nodeId);
    if (known && known === this.growing?.node) return;
    if (!text) {
      if (known && !known.children.length) tree.remove(known);
      if (known) this.#renderUnlessEditing();
      return;
    }
    const wasStreaming = known?.streaming;
    const node = tree.put(JSON.parse(text));
    this.showPictures(this.talk);
    const follow = isAtEnd();
    if (wasStreaming && node.streaming) this.answerView(node).draw();
    else this.#renderUnlessEditing();
    if (follow) scrollToEnd();
  }

  #renderUnlessEditing() {
    if (this.editing === null) this.render(); // the end of the edit renders too
  }

  /* Answers that another tab was receiving when it ended without a word. */
  findLost() {
    const lost = [...this.tree.nodes.values()].filter((node) => node !== this.growing?.node && isLost(node));
    if (!lost.length) return;
    for (const node of lost) this.tree.changed(interrupt(node));
    this.keep(this.talk);
    this.#renderUnlessEditing();
  }

  /* ---- Models ---- */

  async loadModels() {
    clearTimeout(this.retryTimer);
    try {
      const { data } = await (await request("v1/models", this.settings.apiKey)).json();
      const before = model.value || this.settings.values.model;
      model.replaceChildren(
        ...data.map(({ id }) => element("option", { value: id, textContent: id.split("/").at(-1), title: id })),
      );
      if (data.some(({ id }) => id === before)) model.value = before;
      pictures.offer(data.some((card) => card.input_modalities.includes("image")));
      model.hidden = false;
      banner.hidden = true;
    } catch (error) {
      const again = action("Try again", () => this.loadModels());
      const isTemporary = error.status === undefined || error.status === 503;
      const text = error.message + (isTemporary ? " Trying again…" : "");
      banner.replaceChildren(element("span", { textContent: text }), again);
      if (error.status === 401) banner.append(action("Open settings", this.openSettings));
      if (isTemporary) this.retryTimer = setTimeout(() => this.loadModels(), RETRY_MS);
      banner.hidden = false;
    }
    this.modelChanged();
    this.updateSend();
  }

  modelChanged() {
    if (this.tree.path().length === 1 && this.editing === null) this.render();
  }
}

/* Draws once a frame, and no more than a third of the time where one drawing takes long. */
class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.timer = 0;
    this.frame = 0;
    this.notBefore = 0;
  }
  ask() {
    if (this.timer || this.frame) return;
    const wait = this.notBefore - performance.now();
    if (wait <= 0) this.frame = requestAnimationFrame(() => this.#now());
    else this.timer = setTimeout(() => this.#now(), wait);
  }
  #now() {
    this.timer = this.frame = 0;
    const started = performance.now();
    this.draw();
    const took = performance.now() - started;
    if (took > LONG_DRAWING_MS) this.notBefore = performance.now() + 2 * took;
  }
  end() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
  }
}

function isAtEnd() {
  return window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 80;
}

function scrollToEnd() {
  window.scrollTo({ top: document.documentElement.scrollHeight });
}

function announce(text) {
  $("status").textContent = text;
}

/* ---- Wiring ---- */

const pictures = new Pictures($("pictures"), () => app.updateSend());
const app = new App();
const talks = new TalkList(app);

$("compose").onsubmit = (event) => {
  event.preventDefault();
  if (app.running) return app.stop();
  const text = input.value.trim();
  if ((!text && pictures.isEmpty) || pictures.reading || !model.value) return;
  input.value = "";
  app.editing = null;
  app.ask(text, pictures.take());
};
pictures.listen(input);
input.oninput = () => app.updateSend();
input.onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!app.running) $("compose").requestSubmit();
  }
  if (event.key === "ArrowUp" && !input.value && !app.running) {
    const mine = app.tree.path().findLast((node) => node.role === "user");
    if (mine) {
      event.preventDefault();
      app.edit(mine);
    }
  }
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) app.stop();
});
model.onchange = () => {
  app.settings.change({ model: model.value });
  app.modelChanged();
};
$("new").onclick = () => app.startOver();
$("full").append(FULL + " ", action("Conversations", () => talks.open()));
$("open-settings").onclick = app.openSettings;
$("settings").onclose = () => {
  if (app.settings.close() || !model.value) app.loadModels();
};
for (const event of ["beforeunload", "pagehide"]) window.addEventListener(event, () => app.leave());
window.addEventListener("storage", (event) => {
  app.storedElsewhere(event.key, event.newValue);
  talks.storedElsewhere();
});
setInterval(() => app.findLost(), BEAT_MS);
app.render();
app.showPictures(app.talk);
app.renamed();
app.loadModels();
