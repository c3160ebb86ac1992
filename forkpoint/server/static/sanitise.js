/* HTML to nodes. What a model writes is hostile until it has been here. */

import "./vendor/purify.min.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    ...["a", "blockquote", "br", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "hr", "input", "kbd", "li", "mark"],
    ...["ol", "p", "pre", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul"],
  ],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "type"],
  ADD_URI_SAFE_ATTR: ["align", "start", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

export function sanitised(html) {
  return globalThis.DOMPurify.sanitize(html, ALLOWED);
}
