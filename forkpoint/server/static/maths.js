/* Formulas: where LaTeX begins and ends in Markdown, and how Temml draws it as MathML. */

import { element, escaped } from "./dom.js";

const LONGEST = 10_000; // characters of a formula that is drawn
const ENVIRONMENTS = "(?:equation|align|alignat|gather|multline|CD)\\*?";
/* A formula on lines of its own. A blank line ends the search for the closing mark. */
const DISPLAY = new RegExp(
  "^ {0,3}(?:" +
    [
      /\$\$(?:(?!\$\$|\n[ \t]*\n)[^]){1,8000}\$\$/.source,
      /\\\[(?:(?!\\\]|\n[ \t]*\n)[^]){1,8000}\\\]/.source,
      String.raw`\\begin\{(?<name>${ENVIRONMENTS})\}(?:(?!\n[ \t]*\n)[^]){1,8000}?\\end\{\k<name>\}`,
    ].join("|") +
    ")[ \\t]*(?:\\n|$)",
);
/* A formula whose closing mark has not arrived. */
const UNCLOSED = new RegExp(String.raw`^ {0,3}(?:\$\$|\\\[|\\begin\{${ENVIRONMENTS}\})(?:(?!\$\$|\\\]|\n[ \t]*\n)[^])*$`);
const DISPLAY_START = new RegExp(String.raw`\n {0,3}(?:\$\$|\\\[|\\begin\{${ENVIRONMENTS}\})`);
const INLINE = /^(?:\$\$((?:(?!\$\$|\n\n)[^]){1,4000})\$\$|\\\[((?:(?!\\\]|\n\n)[^]){1,4000})\\\]|\\\(((?:(?!\\\)|\n\n)[^]){1,4000})\\\))/;
/* Pandoc's rule: no space inside the dollars, and no letter or digit after the second one. */
const DOLLARS = /^\$(?![\s$])((?:[^$\\]|\\[^]){1,2000}?)(?<!\s)\$(?![\w$])/;
const PRICE = /^\d[\d.,]*[kKmMbB%]?[)\]*_]*(?:[ \n]+(?:(?:a|an)[ \n]+)?[A-Za-z]{2,}|[,;:] )/;
const ANYWHERE = new RegExp(String.raw`(?<![\w$\\])${DOLLARS.source.slice(1)}|\\\((?:(?!\\\))[^]){1,500}\\\)`, "g");
export const HIDDEN_PIPE = "\ue000"; // of a private area, so that it stands for nothing else
const INLINE_START = /\$|\\[[(]/;

function isFormula(text) {
  return !PRICE.test(text) && !text.includes("\n\n");
}

/* Extensions of marked. */
export const displayMaths = {
  name: "displayMaths",
  level: "block",
  start: (src) => src.match(DISPLAY_START)?.index,
  tokenizer(src) {
    const found = src.match(DISPLAY) ?? (this.lexer.isOpen ? src.match(UNCLOSED) : null);
    return found ? { type: "displayMaths", raw: found[0], text: found[0].trim() } : undefined;
  },
  renderer: ({ text }) => `<div class="maths">${escaped(text)}</div>`,
};
export const inlineMaths = {
  name: "inlineMaths",
  level: "inline",
  start: (src) => src.match(INLINE_START)?.index,
  tokenizer(src, tokens) {
    let found = src.match(INLINE);
    if (!found && !/[\w$]$/.test(tokens.at(-1)?.raw ?? "")) {
      found = src.match(DOLLARS);
      if (found && !isFormula(found[1])) found = null;
    }
    return found ? { type: "inlineMaths", raw: found[0], text: found[0] } : undefined;
  },
  renderer: ({ text }) => `<span class="maths">${escaped(text)}</span>`,
};

/* The text with letters for its formulas, so that a * in a formula ends no emphasis that began before it. */
export function withoutMaths(text) {
  return withFormulas(text, (formula) => "a".repeat(formula.length));
}

/* The text with another sign for each | in a formula, so that no cell of a table ends there. */
export function withPipesHidden(text) {
  return withFormulas(text, (formula) => formula.replaceAll("|", HIDDEN_PIPE));
}

function withFormulas(text, change) {
  return text.replace(ANYWHERE, (all, inside) => (inside === undefined || isFormula(inside) ? change(all) : all));
}

/* Replaces each source by its formula. A source that Temml does not understand stays as it was written. */
export function drawMaths(root) {
  const sources = [...root.querySelectorAll(".maths")];
  if (!sources.length) return;
  if (globalThis.temml) for (const source of sources) draw(source);
  else loaded().then(() => sources.forEach(draw), () => {});
}

function draw(node) {
  const text = node.textContent;
  if (text.length > LONGEST) return;
  const isBlock = node.tagName === "DIV";
  const mark = /^\$\$|^\\[[(]/.test(text) ? 2 : text[0] === "$" ? 1 : 0;
  const made = element("span");
  try {
    const options = { displayMode: isBlock || /^(?:\$\$|\\\[)/.test(text), throwOnError: true };
    globalThis.temml.render(text.slice(mark, text.length - mark), made, options);
  } catch {
    return; // not LaTeX that Temml knows, or nested deeper than the stack allows
  }
  if (isBlock) Object.assign(node, { className: "maths drawn wide", tabIndex: 0 });
  else node.className = "maths drawn";
  node.replaceChildren(...made.childNodes);
}

/* Temml is a classic script, so it is loaded by an element and not by import(). */
let loading = null;
function loaded() {
  loading ??= new Promise((resolve, reject) => {
    const path = new URL("vendor/temml.min.js", import.meta.url).href;
    const policy = globalThis.trustedTypes?.createPolicy("vendor", { createScriptURL: () => path });
    const style = element("link", { rel: "stylesheet", href: new URL("vendor/Temml-Local.css", import.meta.url).href });
    const script = element("script", { src: policy ? policy.createScriptURL("") : path, onload: resolve, onerror: reject });
    document.head.append(style, script);
  });
  return loading;
}
