/* What each message shows. `app` is what a person can do, and where the conversation stands. */

import { $, action, copyText, count, element } from "./dom.js";
import { thumbnails, withoutPictures } from "./pictures.js";
import { Prose } from "./prose.js";

export const ROLES = { user: "You", assistant: "Answer", system: "System prompt" };
const MISSES = {
  cold: () => "The rest had not been seen before.",
  short: () => "The rest is shorter than one block.",
  no_checkpoint: (cache) =>
    `Keys and values are kept for ${count(cache.kv_num_tokens ?? 0)} tokens, but no state was kept there.`,
  evicted: () => "The rest was kept once and evicted for other prompts.",
  bypassed: () => "This request was told not to read the cache.",
};
const PLAIN_MISSES = ["cold", "short"]; // nothing to explain: told in the tooltip only
const LEAST_DECODE_SECONDS = 0.1; // a speed of less time is chance
const LEAST_CACHED = 64; // tokens; of shorter prompts nothing can be

/* A button that rests while an answer is being written. */
export function idle(button) {
  button.dataset.idle = "";
  return button;
}

export function messageView(node, app) {
  const view = element("article", { className: "message " + node.role, ariaLabel: ROLES[node.role] });
  view.dataset.id = node.id;
  if (app.editing === node.id) view.append(editorView(node, app));
  else if (node.role === "system") view.append(systemView(node, app));
  else if (node.role === "user")
    view.append(questionView(node), underView(node, app));
  else {
    view.append(app.answerView(node).draw());
    if (!node.streaming) view.append(underView(node, app));
  }
  return view;
}

function questionView(node) {
  const view = element("div", { className: "body", textContent: node.content });
  const images = node.images ?? [];
  if (images.length) view.prepend(element("div", { className: "pictures" }, ...thumbnails(images)));
  if (node.pictures && node.images && images.length < node.pictures.count)
    view.append(element("p", { className: "none", textContent: "The images of this message are no longer kept in the browser." }));
  return view;
}

function systemView(node, app) {
  const text = element("span", { className: "body", textContent: node.content || "none" });
  return element(
    "div",
    { className: "row" },
    element("b", { textContent: "System prompt" }),
    text,
    branchesView(node, app),
    idle(action(node.content ? "Edit" : "Add", () => app.edit(node), "system prompt")),
  );
}

/* An answer that may still grow: `draw` shows what came since. Nodes that are shown stay, so that nothing in them scrolls back. */
export class AnswerView {
  constructor(node, app) {
    this.node = node;
    this.app = app;
    this.thought = new ThoughtView(node);
    this.prose = new Prose();
    this.rest = element("div");
    this.view = element("div", { className: "body" }, this.thought.view, this.prose.view, this.rest);
  }
  draw() {
    const { node } = this;
    this.thought.draw();
    this.prose.view.hidden = !node.content;
    if (node.content) this.prose.show(node.content, Boolean(node.streaming));
    const parts = (node.toolCalls ?? []).filter(Boolean).map(callView);
    const isEmpty = !node.content && !parts.length;
    if (node.streaming && isEmpty && !node.reasoning) parts.push(waitingView(node));
    if (!node.streaming && !node.error && isEmpty) parts.push(element("p", { className: "none", textContent: emptyText(node) }));
    if (node.error) parts.push(failureView(node, this.app));
    else if (!node.streaming && isUnfinished(node)) parts.push(unfinishedView(node, this.app));
    this.rest.replaceChildren(...parts);
    return this.view;
  }
}

function waitingView(node) {
  if (!node.isLoading) return element("div", { className: "waiting", role: "img", ariaLabel: "Waiting for the first token" });
  return element("p", { className: "none waiting", textContent: "The model is still loading. The answer starts when it is ready. " });
}

function emptyText(node) {
  if (node.interrupted) return "The page was closed before the first word.";
  if (node.stopped) return node.reasoning ? "Stopped while thinking." : "Stopped before the first word.";
  return node.reasoning ? "The model thought, but gave no answer." : "The answer is empty.";
}

function isUnfinished(node) {
  return Boolean(node.interrupted || node.stopped || node.finish === "length");
}

/* Says why an answer is not whole, with what can be done about it. */
function unfinishedView(node, app) {
  const view = element("div", { className: "unfinished" });
  if (node.interrupted && (node.content || node.reasoning))
    view.append(element("span", { textContent: "Interrupted: the page was closed or reloaded before the answer was complete." }));
  if (node.content) view.append(idle(action("Continue", () => app.continueAnswer(node))));
  if (node.interrupted) view.append(idle(action("Regenerate", () => app.retry(node))));
  return view;
}

function callView({ name, arguments: text }) {
  return element(
    "div",
    { className: "call" },
    element("b", { textContent: "Tool call: " }),
    element("code", { textContent: name }),
    element("pre", { textContent: text, tabIndex: 0, ariaLabel: `Arguments of ${name}` }),
  );
}

/* The folded reasoning of an answer. */
class ThoughtView {
  constructor(node) {
    this.node = node;
    this.summary = element("summary");
    this.text = element("div");
    this.view = element("details", { className: "thought", hidden: true }, this.summary, this.text);
  }
  draw() {
    const { node } = this;
    this.view.hidden = !node.reasoning;
    if (!node.reasoning) return;
    const seconds = node.thoughtSeconds >= 0.1 ? ` for ${node.thoughtSeconds.toFixed(1)} s` : "";
    this.summary.textContent = node.streaming && !node.content ? "Thinking…" : "Thought" + seconds;
    const text = node.reasoning.trim(),
      shown = this.text.textContent;
    if (!this.text.firstChild || !text.startsWith(shown)) this.text.replaceChildren(text);
    else if (text.length > shown.length) this.text.firstChild.appendData(text.slice(shown.length));
  }
}

function failureView(node, app) {
  const again = idle(action("Try again", () => app.retry(node)));
  const view = element("div", { className: "failure", role: "alert" }, node.error.message + " ", again);
  if (node.content) view.append(idle(action("Continue", () => app.continueAnswer(node))));
  if (node.error.status === 401) view.append(action("Open settings", app.openSettings));
  return view;
}

function underView(node, app) {
  const view = element("div", { className: "under" });
  const isAnswer = node.role === "assistant";
  if (isAnswer && node.figures) view.append(figuresView(node));
  if (isAnswer && node.edited) view.append(element("span", { className: "none", textContent: "edited by you" }));
  view.append(branchesView(node, app));
  const buttons = [];
  if (node.content) buttons.push(action("Copy", (event) => copyText(node.content, event.currentTarget), "message"));
  if (isAnswer && !node.error) buttons.push(idle(action("Regenerate", () => app.retry(node))));
  if (node.content || !isAnswer) buttons.push(idle(action("Edit", () => app.edit(node), "and branch")));
  if (isAnswer && node.sent) buttons.push(action("Raw", () => showRaw(node, app), "request and figures"));
  view.append(element("span", { className: "acts" }, ...buttons));
  const miss = node.cache?.miss;
  if (isAnswer && node.figures && Object.hasOwn(MISSES, miss ?? "") && !PLAIN_MISSES.includes(miss))
    view.append(element("span", { className: "why", textContent: MISSES[miss](node.cache) }));
  return view;
}

function figuresView(node) {
  const { figures, usage, cache, speculation } = node,
    row = element("div");
  const say = (textContent, title = "") => row.append(element("span", { textContent, title }));
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? null,
    prompt = usage?.prompt_tokens ?? 0;
  const why = Object.hasOwn(MISSES, cache?.miss ?? "") ? MISSES[cache.miss](cache) : "";
  if (cached && prompt) {
    const share = cached / prompt;
    const fill = element("i", { style: `width: ${share * 100}%` });
    const label = `${Math.round(share * 100)} % of the prompt cached`;
    row.append(element("span", { role: "img", ariaLabel: label }, element("div", { className: "bar" }, fill)));
    say(`${count(cached)} of ${count(prompt)} prompt tokens cached`, why);
    const peer = cache?.num_peer_tokens ?? 0,
      tier = (cache?.num_restored_tokens ?? 0) - peer;
    if (tier > 0) say(`${count(tier)} of them from a tier`, "Copied from the host's memory or a disk.");
    if (peer > 0) say(`${count(peer)} of them from another server`);
  } else if (prompt)
    say(`${count(prompt)} prompt tokens${cached === 0 && prompt >= LEAST_CACHED ? ", none cached" : ""}`, why);
  const images = usage?.prompt_tokens_details?.image_tokens ?? 0;
  if (images) say(`${count(cache?.num_image_tokens ?? 0)} of ${count(images)} image tokens cached`);
  say("first token " + duration(figures.firstTokenSeconds));
  if (usage?.completion_tokens > 1 && figures.decodeSeconds >= LEAST_DECODE_SECONDS)
    say(`${((usage.completion_tokens - 1) / figures.decodeSeconds).toFixed(1)} tokens/s`);
  if (usage?.completion_tokens > 1 && speculation) {
    const { num_draft_tokens: drafted, num_accepted_tokens: accepted } = speculation;
    const steps = Math.max(1, usage.completion_tokens - accepted);
    say(
      `${(usage.completion_tokens / steps).toFixed(2)} tokens a step`,
      `${count(accepted)} of ${count(drafted)} drafted tokens were right.`,
    );
  }
  if (node.stopped) say("stopped");
  if (node.finish === "length") say("cut at the token limit");
  return element("div", { className: "figures" }, row);
}

function branchesView(node, app) {
  const ids = app.tree.siblings(node),
    at = ids.indexOf(node.id);
  const view = element("span", { className: "branches" });
  if (ids.length < 2) return view;
  const step = (by, label, sign) => {
    const button = action(sign, () => app.choose(ids[at + by], label));
    button.ariaLabel = label;
    button.disabled = ids[at + by] === undefined;
    return button;
  };
  view.append(
    step(-1, "Previous branch", "‹"),
    element("span", {
      textContent: `${at + 1}/${ids.length}`,
      role: "img",
      ariaLabel: `Branch ${at + 1} of ${ids.length}`,
    }),
    step(1, "Next branch", "›"),
  );
  return view;
}

function editorView(node, app) {
  const area = element("textarea", { value: node.content, ariaLabel: "Edit: " + ROLES[node.role].toLowerCase() });
  const label =
    node.role === "user" ? "Send as a new branch" : app.isChangeable(node) ? "Save" : "Save as a new branch";
  const done = element("button", {
    className: "solid",
    type: "button",
    textContent: label,
    onclick: () => app.finishEdit(node, area.value),
  });
  const keys = node.role === "user" ? "Enter sends, Esc cancels" : "Ctrl+Enter saves, Esc cancels";
  area.onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      app.cancelEdit();
    }
    if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
    if (node.role === "user" || event.ctrlKey || event.metaKey) {
      event.preventDefault();
      app.finishEdit(node, area.value);
    }
  };
  return element(
    "div",
    { className: "editor" },
    area,
    element("div", { className: "row" }, element("small", { textContent: keys }), action("Cancel", app.cancelEdit), done),
  );
}

function showRaw(node, app) {
  const messages = app.tree.messagesTo(app.tree.get(node.parent));
  if (node.sent.continue_final_message) messages.push({ role: "assistant", content: node.content.slice(0, node.continuedAt) });
  const asked = { ...node.sent, messages };
  const { usage = null, cache = null, speculation, finish: finish_reason = null, content, reasoning } = node;
  $("raw-request").textContent = JSON.stringify(asked, withoutPictures, 2);
  $("raw-answer").textContent = JSON.stringify({ usage, cache, speculation, finish_reason, reasoning, content }, null, 2);
  $("raw").showModal();
}

function duration(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}
