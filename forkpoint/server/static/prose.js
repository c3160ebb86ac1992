/* An answer that grows. Blocks that are complete are drawn once; only the last one is read again. */

import { CodeView } from "./code.js";
import { element } from "./dom.js";
import { blocks, drawn } from "./markdown.js";

const SHORT_WINDOW = 4000; // characters that are read at a time
const LONG_WINDOW = 32_000; // for a block that is longer; what is longer still, other than code, is cut at a line
const SLICE_MS = 30; // of drawing, before the page may do something else
const FENCE = /^ {0,3}(?<fence>`{3,}(?=[^`\n]*(?:\n|$))|~{3,})(?<info>[^\n]*)(?<end>\n|$)/;
/* The start of a line that may yet become a list, a rule, a fence or a table. It is not shown before that is decided. */
const UNDECIDED = /(?:^|\n)[ \t]*(?:[-=*+_#>`~|:$\\[ \t]{1,100}|\d{1,9}[.)]?[ \t]*)$/;
const BLANK_LINES = /(?:[ \t]*\n)+/y;
const UNDECIDED_IN_CODE = /(?:^|\n) {0,3}[`~]*$/;

export class Prose {
  constructor() {
    this.view = element("div", { className: "prose" });
    this.numSettled = 0; // characters of the text whose nodes stay
    this.tail = []; // nodes of the rest
    this.shown = null; // the rest that `tail` shows
    this.code = null; // {view, start}: the code block that grows, and where its text begins
    this.window = SHORT_WINDOW;
    this.frame = 0;
  }

  /* `text` begins with what was shown before. `isOpen`: more of it may come. A long text is drawn over several frames. */
  show(text, isOpen) {
    cancelAnimationFrame(this.frame);
    text = text.replace(/\r\n?/g, "\n");
    const deadline = performance.now() + SLICE_MS;
    while (this.#settle(text, isOpen))
      if (performance.now() > deadline) {
        this.frame = requestAnimationFrame(() => this.show(text, isOpen));
        return;
      }
    if (!this.code) this.#drawTail(text, isOpen);
  }

  /* Draws complete blocks for good. False where the rest of the text is incomplete, or nothing is left. */
  #settle(text, isOpen) {
    BLANK_LINES.lastIndex = this.numSettled;
    if (!this.code && BLANK_LINES.test(text)) this.numSettled = BLANK_LINES.lastIndex;
    if (this.numSettled >= text.length) return false;
    const rest = text.slice(this.numSettled, this.numSettled + this.window);
    if (this.code || FENCE.test(rest)) return this.#growCode(text, rest, isOpen);
    const isAll = this.numSettled + rest.length === text.length;
    const tokens = blocks(rest, isOpen && isAll);
    const numComplete = isAll && !isOpen ? tokens.length : numCompleteTokens(tokens);
    const firstFence = tokens.findIndex((token) => token.type === "code" && FENCE.test(token.raw));
    let done = tokens.slice(0, firstFence > 0 ? Math.min(firstFence, numComplete) : numComplete),
      length = done.reduce((sum, token) => sum + token.raw.length, 0);
    if (!length && !isAll && this.window < LONG_WINDOW) {
      this.window *= 2;
      return true;
    }
    if (!length && !isAll) {
      length = rest.lastIndexOf("\n") + 1 || rest.length;
      done = blocks(rest.slice(0, length), false);
    }
    if (!length) return false;
    this.#keep([drawn(done)]);
    this.numSettled += length;
    this.window = SHORT_WINDOW;
    return true;
  }

  /* Fenced code is read here and not by marked, so that a long block costs no more than what is added to it. */
  #growCode(text, rest, isOpen) {
    if (!this.code) {
      const { fence, info, end } = rest.match(FENCE).groups;
      if (!end && isOpen) return false; // the language is not complete
      const start = this.numSettled + rest.match(FENCE)[0].length;
      const view = new CodeView(info.trim().split(/\s/)[0]);
      this.#keep([view.view]);
      this.code = { view, start, searched: start, closing: new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}[ \\t]*(?:\\n|$)`, "gm") };
    }
    const { view, start, closing } = this.code;
    closing.lastIndex = this.code.searched;
    const found = closing.exec(text);
    this.code.searched = Math.max(start, text.lastIndexOf("\n") + 1);
    const isClosed = found !== null && (found[0].endsWith("\n") || !isOpen);
    let end = text.length;
    if (found) end = Math.max(start, found.index - 1);
    else if (isOpen) end = beforeUndecided(text, start, UNDECIDED_IN_CODE);
    view.show(text.slice(start, end), isOpen && !isClosed);
    if (!isClosed) return false;
    this.numSettled = found.index + found[0].length;
    this.code = null;
    return true;
  }

  #keep(nodes) {
    this.#dropTail();
    this.view.append(...nodes);
  }

  #dropTail() {
    for (const node of this.tail) node.remove();
    this.tail = [];
    this.shown = null;
  }

  #drawTail(text, isOpen) {
    let rest = text.slice(this.numSettled);
    if (isOpen) rest = rest.slice(0, beforeUndecided(rest, 0, UNDECIDED));
    if (rest === this.shown) return;
    const before = this.tail.map((node) => node.scrollLeft);
    this.#dropTail();
    this.shown = rest;
    this.tail = [...drawn(blocks(rest, isOpen)).childNodes];
    this.view.append(...this.tail);
    this.tail.forEach((node, at) => {
      if (before[at]) node.scrollLeft = before[at];
    });
  }
}

/* Tokens that later text cannot change: all but the last, once that one has a complete line. A line of which only the
   beginning is there may still belong to the list before it. */
function numCompleteTokens(tokens) {
  let last = tokens.length - 1;
  while (last >= 0 && tokens[last].type === "space") last--;
  if (last > 0 && !tokens[last].raw.includes("\n") && last === tokens.length - 1) {
    last--;
    while (last >= 0 && tokens[last].type === "space") last--;
  }
  return Math.max(0, last);
}

/* The length of the text without a last line that is undecided. */
function beforeUndecided(text, start, undecided) {
  const line = Math.max(start, text.lastIndexOf("\n"));
  const found = text.slice(line).match(undecided);
  return found ? Math.max(start, line) : text.length;
}
