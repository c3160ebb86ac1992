/* Code blocks: their text, their colours and their button. highlight.js is loaded with the first block that names a language. */

import { copyText, element } from "./dom.js";
import { sanitised } from "./sanitise.js";

const LONGEST_COLOURED = 50_000; // characters; longer code stays in one colour

export class CodeView {
  constructor(language) {
    this.language = language;
    this.code = element("code");
    this.text = "";
    const copy = element("button", { className: "quiet", type: "button", textContent: "Copy", ariaLabel: "Copy code" });
    copy.onclick = () => copyText(this.text, copy);
    const pre = element("pre", { tabIndex: 0, ariaLabel: language || "Code" }, this.code);
    this.view = element("div", { className: "code" }, pre, copy);
  }

  /* `text` begins with what was shown before, so that only the rest is added to the page. */
  show(text, isOpen) {
    const added = text.slice(this.text.length);
    this.text = text;
    if (this.code.children.length) this.code.replaceChildren(text);
    else if (this.code.lastChild) this.code.lastChild.appendData(added);
    else this.code.append(text);
    if (!isOpen) this.#colour();
  }

  #colour() {
    if (!this.language || this.text.length > LONGEST_COLOURED) return;
    withHighlighter((highlighter) => {
      if (!highlighter.getLanguage(this.language)) return;
      const { value } = highlighter.highlight(this.text, { language: this.language, ignoreIllegals: true });
      this.code.replaceChildren(sanitised(value));
    });
  }
}

/* At once where the library is loaded, so that no block is shown first without its colours. */
let highlighter = null;
function withHighlighter(use) {
  if (highlighter) return use(highlighter);
  import("./vendor/highlight.min.js").then((module) => {
    highlighter = module.default;
    use(highlighter);
  }, () => {});
}
