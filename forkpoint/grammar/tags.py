"""Converts structural tags, xgrammar's description of free text with constrained parts, to grammars of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from forkpoint.checks import one_or_more
from forkpoint.errors import InvalidParamsError
from forkpoint.grammar.gbnf import literal, parser_grammar, regex_literal
from forkpoint.grammar.schema import enforceable

HEADER = '%llguidance {"no_forcing": true}'  # forced text may be written with any tokens, like other text
_ANY = "/(?s:.*)/"
_NEVER = "(?!)"  # a regular expression that matches nothing


def grammars_of_tags(text: str, special_ids: Mapping[str, int], *, compact: bool) -> list[dict[str, str]]:
    """Return the llguidance grammars of a structural tag's text, the main one first.

    `special_ids` maps texts to the tokens that stand for them. `compact`: JSON is written as `json.dumps` does. Raises
    InvalidParamsError.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParamsError(f"the structural tag is not JSON: {error}") from error
    writer = _Writer(special_ids, compact)
    try:
        start = writer.format(_format(tag))
    except (KeyError, TypeError, AttributeError) as error:
        _refuse(f"is not as xgrammar describes it: {type(error).__name__} {error}")
    main = {"name": "tags", "lark_grammar": "\n".join([HEADER, f"start: {start}", *writer.rules])}
    return [main, *writer.grammars]


def _format(tag: Any) -> Any:
    """Return the format of a tag, converted from the older form with `structures` and `triggers` if necessary.

    Raises InvalidParamsError without either.
    """
    if not isinstance(tag, dict) or not ("format" in tag or {"structures", "triggers"} <= set(tag)):
        _refuse("has no 'format'; give {'type': 'structural_tag', 'format': {...}}")
    if "format" in tag:
        return tag["format"]
    tags = [
        {"begin": one["begin"], "content": {"type": "json_schema", "json_schema": one["schema"]}, "end": one["end"]}
        for one in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _refuse(why: str) -> NoReturn:
    raise InvalidParamsError(f"the structural tag {why}")


class _Writer:
    def __init__(self, special_ids: Mapping[str, int], compact: bool) -> None:
        self._special_ids = special_ids
        specials = "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True)))
        self._specials = re.compile(f"({specials or _NEVER})")
        self._compact = compact
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []

    def format(self, given: Any) -> str:
        kind = given["type"]
        if kind in ("optional", "star", "plus"):
            return f"({self.format(given['content'])}{ {'optional': '?', 'star': '*', 'plus': '+'}[kind] })"
        if isinstance(kind, str) and hasattr(self, f"_of_{kind}"):
            return f"({getattr(self, f'_of_{kind}')(given)})"
        known = ", ".join(sorted(name.removeprefix("_of_") for name in dir(self) if name.startswith("_of_")))
        _refuse(f"has a format of type {kind!r}; known are {known}, optional, star, plus")

    def _of_const_string(self, given: Any) -> str:
        return self._text(given["value"])

    def _of_json_schema(self, given: Any) -> str:
        if given.get("style", "json") != "json":
            _refuse(f"has a schema of style {given['style']!r}; known is json")
        return "%json " + enforceable(json.dumps(given["json_schema"]), compact=self._compact)

    def _of_regex(self, given: Any) -> str:
        return regex_literal(given["pattern"])

    def _of_grammar(self, given: Any) -> str:
        try:
            inner = parser_grammar(given["grammar"], compact=self._compact)
        except Exception as error:  # any error concerns only this text
            _refuse(f"has a grammar that cannot be parsed: {error}")
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": inner})
        return f"@{name}"

    def _of_any_text(self, given: Any) -> str:
        self._require_free(given)
        return _ANY

    def _of_sequence(self, given: Any) -> str:
        if any(one["type"] == "any_text" for one in given["elements"][:-1]):
            _refuse("has any_text before other elements; put it last, or in a tag with an end")
        return " ".join(map(self.format, given["elements"]))

    def _of_or(self, given: Any) -> str:
        return " | ".join(map(self.format, given["elements"]))

    def _of_tag(self, given: Any) -> str:
        return f"{self._text(given['begin'])} {self._inside(given)}"

    def _of_triggered_tags(self, given: Any) -> str:
        """Return a rule for free text up to a trigger, then the rest of a tag that begins with it."""
        self._require_free(given)
        options = []
        for trigger in given["triggers"]:
            tags = [tag for tag in given["tags"] if tag["begin"].startswith(trigger)]
            if tags:
                rests = [f"{self._text(tag['begin'][len(trigger) :])} {self._inside(tag)}" for tag in tags]
                options.append(f"{self._up_to(trigger)} ({' | '.join(rests)})")
        if any(not tag["begin"].startswith(tuple(given["triggers"])) for tag in given["tags"]):
            _refuse("has a tag that begins with none of the triggers")
        once, least = given.get("stop_after_first", False), given.get("at_least_one", False)
        calls = f"({' | '.join(options)})"
        forms = {
            (True, True): calls,
            (True, False): f"{calls} | {_ANY}",
            (False, True): f"{calls}+ {_ANY}",
            (False, False): f"{calls}* {_ANY}",
        }
        return forms[bool(once), bool(least)]

    def _of_tags_with_separator(self, given: Any) -> str:
        tag = f"({' | '.join(self._of_tag(tag) for tag in given['tags'])})"
        tags = tag
        if not given.get("stop_after_first", False):
            tags += f" ({self._text(given['separator'])} {tag})*"
        if given.get("at_least_one", False):
            return tags
        return f"({tags})?"

    def _inside(self, tag: Any) -> str:
        """Return a rule for the content of a tag, and its end."""
        ends = one_or_more(tag["end"])
        if tag["content"]["type"] == "any_text" and any(ends):
            self._require_free(tag["content"])
            return "(" + " | ".join(map(self._up_to, ends)) + ")"
        return f"{self.format(tag['content'])} ({' | '.join(map(self._text, ends))})"

    def _up_to(self, text: str) -> str:
        """Return a rule for the shortest text that ends with `text`, and add the rules it needs."""
        if self._specials.match(text):
            return f"{_ANY} {self._text(text)}"
        first = self._specials.split(text)[0]
        name = f"up_to_{len(self.rules)}"
        self.rules += [f"{name}[lazy]: UP_TO_{len(self.rules)}", f"UP_TO_{len(self.rules)}: {_ANY} {literal(first)}"]
        return f"{name} {self._text(text[len(first) :])}"

    def _text(self, text: str) -> str:
        parts, known = filter(None, self._specials.split(text)), self._special_ids
        return " ".join(f"<[{known[part]}]>" if part in known else literal(part) for part in parts) or '""'

    def _require_free(self, given: Any) -> None:
        for name in ("excludes", "max_tokens", "max_chars"):
            if given.get(name):
                _refuse(f"has {name!r} of free text, which cannot be enforced; leave it out")
