"""Turns JSON as models write it into strict JSON, while it comes."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator
from typing import Any, Final, NoReturn

import regex

from forkpoint.server.calls.incoming import Ending, Incoming

JSON_NUMBER = regex.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
LOOSE_NUMBER = regex.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
MAX_DEPTH = 256  # nested brackets; far below the depth at which other JSON parsers fail
MAX_DIGITS = 4000  # Python refuses to parse integers of more than 4300 digits
WORDS: Final = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
NOT_JSON: Final = ("NaN", "Infinity", "-Infinity")

SPACE_RUN = regex.compile(r"\s+")
NOT_SPACE_IN_JSON = regex.compile(r"[^ \t\n\r]")  # JSON knows only these four kinds of white space
WORD_RUN = regex.compile(r"""[^\s{}\[\],:"'<]+""")
TEXT_RUN = regex.compile(r"""[^"'\\\x00-\x1f<]+""")
ESCAPE = regex.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^ux])", regex.DOTALL)
# A quote ends a string only before such text. Any other quote is part of the string, and should have been escaped.
STRING_END = Ending.compile(r"""["']\s{0,100}(?:[,}\]<]|["'][^"'\\\n]{1,64}["']\s{0,10}:|@END@)""")
VALUE, KEY, COLON, NEXT = "value", "key", "colon", "next"  # what may come now
CLOSING: Final = {"{": "}", "[": "]"}
OPENING: Final = {"}": "{", "]": "["}
AFTER: Final = {KEY: COLON}  # what comes after a key; NEXT comes after a value
ITEM: Final = {"{": KEY, "[": VALUE}  # what comes first within an open bracket, and after each comma there


def strict_json(text: str, default: object = None) -> Any:
    """Return what a text in strict JSON says; `default` for any other text, or one that is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return default


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large a number")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def number_json(text: str, *, whole: bool = False) -> str | None:
    """Return `text` as a JSON number of the same value, or None if it is no finite number. `whole`: 5.0 is 5."""
    if len(text) > MAX_DIGITS or not LOOSE_NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        return None
    if JSON_NUMBER.fullmatch(text):
        if whole and not text.lstrip("-").isdigit():
            value = float(text)
            if value.is_integer() and abs(value) < 2**53:
                return str(int(value))
        return text
    digits = text.replace("_", "").removeprefix("+")
    if digits.lstrip("-").isdigit():
        sign = "-" if digits.startswith("-") else ""
        return sign + (digits.lstrip("-").lstrip("0") or "0")
    return repr(float(digits))


def escaped(text: str) -> str:
    """Return `text` as the inside of a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonText:
    """One JSON value, read piece by piece. Valid JSON passes through unchanged.

    Repaired without further notice: raw control characters; white space of other kinds; Python's words, quotes and
    escapes; loose numbers; commas before a closing bracket. Other mistakes are repaired too but set `sound` to False:
    missing brackets, commas or colons, bare words, and quotes within strings that are not escaped. The text from `read`
    and then `close` is always valid JSON.

    `stop`: text at which even a string ends, such as the tags that end a call. `inner`: tags in a string, in the groups
    `begin` and `end`; between them `stop` does not count, because the string holds an example of a call. `done`: the
    value has ended.
    """

    def __init__(self, stop: Ending | None = None, inner: regex.Pattern[str] | None = None) -> None:
        self.done = False
        self.sound = True
        self._stop = stop
        self._inner = inner
        self._depth = 0  # tags that have begun in the string being read and not ended
        self._stack: list[str] = []  # brackets that are open
        self._ends: list[str] = []  # how each of them is closed
        self._expected = VALUE
        self._held = ""  # white space, and a comma that is dropped if a bracket closes next
        self._quote = ""  # the opening quote of the string being read; empty outside strings

    def read(self, source: Incoming) -> Iterator[str | None]:
        """Yield the parts of the value, and None when more text is needed.

        It stops at the end of the value (`done`), or at a tag or the end of the answer (not `sound`).
        """
        while not self.done:
            if not (yield from source.more()):
                self.sound = False
                return
            if self._quote:
                if not (yield from self._string(source)):
                    self.sound = False
                    return
            elif source.text[source.at] == "<" or len(self._stack) > MAX_DEPTH:
                self.sound = False
                return
            else:
                yield from self._token(source)

    def close(self) -> str:
        """Return the text that completes the parts so far to a JSON value, and set `done`; "" if it is done."""
        if self.done:
            return ""
        self.done = True
        text = ""
        if self._quote:
            text += '"'
            self._expected = AFTER.get(self._expected, NEXT)
        if self._expected == COLON:
            text += ": null"
        elif self._expected == VALUE and (not self._stack or self._stack[-1] == "{"):
            text += "null"
        return text + "".join(reversed(self._ends))

    # --- tokens outside strings

    def _token(self, source: Incoming) -> Iterator[str | None]:
        char = source.text[source.at]
        if space := SPACE_RUN.match(source.text, source.at):
            self._held += NOT_SPACE_IN_JSON.sub(" ", source.take(space.end()))
        elif char in "{[":
            source.at += 1
            yield self._open(char)
        elif char in "}]":
            source.at += 1
            yield self._end(char)
        elif char == ",":
            source.at += 1
            self._comma()
        elif char == ":":
            source.at += 1
            self.sound &= self._expected == COLON
            if self._expected == COLON:
                self._expected = VALUE
                yield self._release() + ":"
        elif char in "\"'":
            source.at += 1
            yield self._begin() + '"'
            self._quote, self._depth = char, 0
        else:
            yield from self._word(source)

    def _open(self, bracket: str) -> str:
        if self._expected == KEY or (self._expected == NEXT and self._stack[-1] == "{"):
            self.sound = False  # there can only be a key, so the bracket is left out: {{"a": 1}} is {"a": 1}
            if bracket == "{":
                self._stack.append(bracket)
                self._ends.append("")
            return ""
        text = self._begin() + bracket
        self._stack.append(bracket)
        self._ends.append(CLOSING[bracket])
        self._expected = ITEM[bracket]
        return text

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _begin(self) -> str:
        """Return the text before a key or value: held text, and a comma or colon if it is missing."""
        if self._expected == NEXT:
            self.sound = False
            self._held = "," + self._held
            self._expected = ITEM[self._stack[-1]]
        elif self._expected == COLON:
            self.sound = False
            self._held = ":" + self._held
            self._expected = VALUE
        return self._release()

    def _comma(self) -> None:
        if self._expected != NEXT:
            self.sound = False
            return
        self._held += ","
        self._expected = ITEM[self._stack[-1]]

    def _end(self, bracket: str) -> str:
        """Close a bracket and all open brackets within it, and return their text; "" if no such bracket is open."""
        opening = OPENING[bracket]
        if opening not in self._stack:
            self.sound = False
            return ""
        if self._expected == KEY and not self._ends[-1]:
            self._stack.pop()
            return self._ends.pop()
        text = self._held.replace(",", "", 1)
        self._held = ""
        if self._expected == COLON or (self._expected == VALUE and self._stack[-1] == "{"):
            self.sound = False
            text += ": null" if self._expected == COLON else "null"
        while True:
            innermost = self._stack.pop()
            text += self._ends.pop()
            if innermost == opening:
                break
            self.sound = False
        self._expected = NEXT
        self.done = not self._stack
        return text

    def _completed(self) -> None:
        """Note that a key, or a value without brackets, has come."""
        self._expected = AFTER.get(self._expected, NEXT)
        self.done = not self._stack

    def _word(self, source: Incoming) -> Iterator[str | None]:
        parts = []
        while True:
            run = WORD_RUN.match(source.text, source.at)
            if run is not None:
                parts.append(source.take(run.end()))
            if not source.is_empty or source.final:
                break
            yield None
        word = "".join(parts)
        if source.cut and source.is_empty:
            yield self._begin() + word
            return
        begun = self._begin()
        value = None
        if self._expected == VALUE:
            value = WORDS.get(word) or number_json(word)
        if value is None:
            self.sound = False
            value = "null" if word in NOT_JSON and self._expected == VALUE else f'"{escaped(word)}"'
        self._completed()
        yield begun + value

    # --- strings

    def _string(self, source: Incoming) -> Generator[str | None, None, bool]:
        """Read a part of a string. Return False at a tag that ends the call within the string, otherwise True."""
        run = TEXT_RUN.match(source.text, source.at)
        if run is not None:
            yield source.take(run.end())
            return True
        char = source.text[source.at]
        if char == "\\":
            yield from self._escape(source)
        elif char == "<":
            if self._stop is not None and not self._depth and (yield from source.matched(self._stop)) is not None:
                return False
            tag = None
            if self._inner is not None:
                tag = yield from source.matched(self._inner)
            if tag is None:
                yield source.take(source.at + 1)
                return True
            if tag["begin"] is not None:
                self._depth += 1
            elif self._depth:
                self._depth -= 1
            yield escaped(source.take(tag.end()))
        elif char == self._quote:
            yield from self._quote_mark(source)
        else:  # a control character or a quote of the other kind
            source.at += 1
            yield escaped(char)
        return True

    def _quote_mark(self, source: Incoming) -> Iterator[str | None]:
        ends = self._expected == KEY or not self._stack
        if not ends:
            ends = (yield from source.matched(STRING_END)) is not None
        source.at += 1
        if not ends:
            self.sound = False
            yield escaped(self._quote)
            return
        self._quote = ""
        self._completed()
        yield '"'

    def _escape(self, source: Incoming) -> Iterator[str | None]:
        found = yield from source.matched(ESCAPE)
        if found is None:  # the answer ends within the escape, or it is not an escape
            source.at += 1
            if not source.is_empty:
                yield "\\\\"
            return
        written = source.take(found.end())
        if written[1] in '"\\/bfnrt' or (written[1] == "u" and len(written) == 6):
            yield written
        elif written[1] == "x" and len(written) == 4:
            yield f"\\u00{written[2:]}"
        elif written[1] == "'":
            yield "'"
        else:
            source.at -= len(written) - 1
            yield "\\\\"
