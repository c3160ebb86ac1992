/* Markdown to nodes: marked reads it, DOMPurify sanitises what comes of it. */

import { CodeView } from "./code.js";
import { element, escaped } from "./dom.js";
import { HIDDEN_PIPE, displayMaths, drawMaths, inlineMaths, withPipesHidden, withoutMaths } from "./maths.js";
import { sanitised } from "./sanitise.js";
import { Lexer, Marked, Parser, Tokenizer } from "./vendor/marked.esm.js";

const DEEPEST = 20; // quotes and lists within each other
const LONGEST_INLINE = 4000; // characters of a paragraph or cell; marks in a longer one are not looked for
const MOST_COLUMNS = 100;
const TABLE_HEAD = /^[^\n]{1,5000}\n[ \t|:-]{1,1000}(?=\n|$)/;
const LINK = /^(?:https?|mailto):/i;
const HARMLESS_TAG = /^<(?:br ?\/?|\/?(?:sub|sup|kbd|mark|u))>$/i;

const marked = new Marked({
  gfm: true,
  breaks: true,
  tokenizer: {
    html: () => undefined, // a block of HTML is a paragraph that shows its tags
    lheading: () => undefined, // models write --- under a paragraph for a line across, not for a heading
    del(src) {
      return src.startsWith("~~") ? false : undefined;
    },
    table(src) {
      const [head] = src.match(TABLE_HEAD) ?? [""];
      if (!head.includes("-") || head.split("|").length > 2 * MOST_COLUMNS) return undefined;
      const end = src.search(/\n[ \t]*(?:\n|$)/);
      const text = end < 0 ? src : src.slice(0, end + 1);
      const token = Tokenizer.prototype.table.call(this, withPipesHidden(text));
      if (token) token.raw = text.slice(0, token.raw.length);
      return token;
    },
  },
  renderer: {
    html: ({ text }) => (HARMLESS_TAG.test(text) ? text : escaped(text)),
    heading(token) {
      const name = `h${Math.min(4, token.depth)}`;
      return `<${name}>${this.parser.parseInline(token.tokens)}</${name}>`;
    },
    link(token) {
      return LINK.test(token.href) ? false : escaped(token.raw);
    },
    /* An image is not fetched: that would tell its server who reads the answer. */
    image(token) {
      if (!LINK.test(token.href)) return escaped(token.raw);
      return `<a href="${escaped(token.href)}">${escaped(token.text || token.href)}</a>`;
    },
    code: ({ text, lang }) => `<pre class="${escaped(lang ?? "")}">${escaped(text)}</pre>`,
  },
});
marked.use({ extensions: [displayMaths, inlineMaths], hooks: { emStrongMask: withoutMaths } });

class BoundedLexer extends Lexer {
  depth = 0;
  /* `isOpen`: more text may follow. */
  constructor(isOpen) {
    super(marked.defaults);
    this.isOpen = isOpen;
  }
  blockTokens(src, tokens = [], ...rest) {
    if (this.depth >= DEEPEST) {
      tokens.push({ type: "text", raw: src, text: src });
      return tokens;
    }
    this.depth++;
    try {
      return super.blockTokens(src, tokens, ...rest);
    } finally {
      this.depth--;
    }
  }
  inlineTokens(src, tokens = []) {
    src = src.replaceAll(HIDDEN_PIPE, "|");
    if (src.length <= LONGEST_INLINE) return super.inlineTokens(src, tokens);
    tokens.push({ type: "text", raw: src, text: src });
    return tokens;
  }
}

/* The blocks of a text, as marked's tokens. `isOpen`: more text may follow. */
export function blocks(text, isOpen) {
  try {
    return new BoundedLexer(isOpen).lex(text);
  } catch {
    return [{ type: "paragraph", raw: text, text, tokens: [{ type: "text", raw: text, text }] }]; // the stack is full
  }
}

/* Nodes that show the blocks. */
export function drawn(tokens) {
  const made = sanitised(new Parser(marked.defaults).parse(tokens));
  for (const pre of made.querySelectorAll("pre")) {
    const code = new CodeView(pre.className);
    code.show(pre.textContent, false);
    pre.replaceWith(code.view);
  }
  for (const table of made.querySelectorAll("table")) {
    const wide = element("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: "Table" });
    table.replaceWith(wide);
    wide.append(table);
  }
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const box of made.querySelectorAll("input")) {
    box.ariaLabel = box.checked ? "Done" : "To do";
    box.closest("li").className = "task";
  }
  drawMaths(made);
  return made;
}
