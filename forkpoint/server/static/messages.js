/* What each message shows. `app` is what a person can do, and where the conversation stands. */

import { $, action, copyText, count, element } from "./dom.js";
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
    view.append(element("div", { className: "body", textContent: node.content }), underView(node, app));
  else {
    view.append(app.answerView(node).draw());
    if (!node.streaming) view.append(underView(node, app));
  }
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

/* An answer that may still grow: `draw` shows what has come since. */
export class AnswerView {
  constructor(node, app) {
    this.node = node;
    this.app = app;
    this.prose = new Prose();
    this.view = element("div", { className: "body" });
  }
  draw() {
    const { node } = this;
    const parts = [];
    if (node.reasoning) parts.push(thoughtView(node));
    if (node.content) {
      this.prose.show(node.content, Boolean(node.streaming));
      parts.push(this.prose.view);
    } else if (node.streaming && !node.reasoning)
      parts.push(element("div", { className: "waiting", role: "img", ariaLabel: "Waiting for the first token" }));
    else if (!node.streaming && !node.error)
      parts.push(
        element("p", {
          className: "none",
          textContent: node.stopped ? "Stopped before the first word." : "The answer is empty.",
        }),
      );
    if (node.error) parts.push(failureView(node, this.app));
    this.view.replaceChildren(...parts);
    return this.view;
  }
}

function thoughtView(node) {
  const seconds = node.thoughtSeconds >= 0.1 ? ` for ${node.thoughtSeconds.toFixed(1)} s` : "";
  const fold = element(
    "details",
    { className: "thought", open: Boolean(node.unfolded) },
    element("summary", { textContent: node.streaming && !node.content ? "Thinking…" : "Thought" + seconds }),
    element("div", { textContent: node.reasoning.trim() }),
  );
  fold.ontoggle = () => {
    node.unfolded = fold.open;
  };
  return fold;
}

function failureView(node, app) {
  const again = idle(action("Try again", () => app.retry(node)));
  const view = element("div", { className: "failure", role: "alert" }, node.error.message + " ", again);
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
  if (isAnswer && !node.error) buttons.push(idle(action("New try", () => app.retry(node))));
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
  } else if (prompt)
    say(`${count(prompt)} prompt tokens${cached === 0 && prompt >= LEAST_CACHED ? ", none cached" : ""}`, why);
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
  const asked = { ...node.sent, messages: app.tree.messagesTo(app.tree.get(node.parent)) };
  const { usage = null, cache = null, speculation, finish: finish_reason = null, content, reasoning } = node;
  $("raw-request").textContent = JSON.stringify(asked, null, 2);
  $("raw-answer").textContent = JSON.stringify({ usage, cache, speculation, finish_reason, reasoning, content }, null, 2);
  $("raw").showModal();
}

function duration(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}
