"""Tool calls in the text of an answer: when one is whole, when none can come about, and what its notation says.

A call that has been told cannot be taken back. So a call that the model writes freely is told when it is whole;
one that a grammar enforces cannot break, and is told as it comes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import regex

FORCED = regex.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

# What a notation's `read` raises for what is no call: reading Python raises all of these.
NO_CALL: Final = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)

Tools: TypeAlias = Mapping[str, Any]  # parameter schemas by name of the function


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Body:
    """What stands behind a `head`, up to a closing tag, or up to the answer's end where it is not `closed`."""

    head: regex.Match[str]
    text: str
    tools: Tools
    closed: bool


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes calls. `head`: how what follows the opening tag begins; `section`: the tags of a further call
    behind the closing one, and of the end of all.

    `read` makes calls of a body: none where the closing tag is part of a value. It raises one of NO_CALL for what is
    no call.
    """

    opening: str
    closing: str
    head: regex.Pattern[str]
    read: Callable[[Body], list[Call]]
    section: tuple[str, str] | None = None


class CallReader:
    """Reads what follows an opening tag until it is whole, or can no longer become a call."""

    def __init__(self, notation: Notation, tools: Tools) -> None:
        self.text = ""
        self._notation = notation
        self._tools = tools
        self._head: regex.Match[str] | None = None
        self._sought = 0  # in `text`: up to where it has been read, or the closing tag been looked for
        self._calls: list[Call] = []

    def feed(self, text: str, final: bool) -> tuple[list[Call], str] | None:
        """The calls once they are whole, and the text behind them; None while they may still come.

        The closing tag may be missing where the answer ends (`final`). Raises one of NO_CALL when there is no call.
        """
        self.text += text
        self._read(final)
        rest = self._rest(final) if self._calls else None
        if rest is None and final:
            raise ValueError("the answer ended within a call")
        return None if rest is None else (self._calls, rest)

    def _read(self, final: bool) -> None:
        notation = self._notation
        if self._head is None:
            head = notation.head.match(self.text, partial=True)
            if head is None:
                raise ValueError("no call begins like this")
            if head.partial:
                return
            self._head, self._sought = head, head.end()
        while not self._calls and (end := self.text.find(notation.closing, self._sought)) >= 0:
            self._calls = notation.read(Body(self._head, self.text[self._head.end() : end], self._tools, True))
            self._sought = end + len(notation.closing)
        if not self._calls and final:
            self._calls = notation.read(Body(self._head, self.text[self._head.end() :], self._tools, False))
            self._sought = len(self.text)
        if not self._calls:  # the tag may have come in part
            self._sought = max(self._sought, len(self.text) - len(notation.closing) + 1)

    def _rest(self, final: bool) -> str | None:
        """The text behind the calls. In a section it waits for what follows them, and begins another where they do."""
        rest = self.text[self._sought :]
        if self._notation.section is None:
            return rest
        another, end = self._notation.section
        following = rest.lstrip()
        if following.startswith(end):
            return following[len(end) :]
        if following.startswith(another):
            return self._notation.opening + following
        waits = not final and (end.startswith(following) or another.startswith(following))
        return None if waits else rest


class ForcedCallReader:
    """Reads an answer that a grammar makes one JSON call without tags, and tells it as it comes."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._text = ""
        self._position = 0

    def feed(self, text: str, final: bool) -> tuple[str | None, str]:
        """Read on: (the name when it is new, the arguments that are new).

        A bracket at the end may be the call's own: it is held back until more comes, and dropped from a whole call.
        """
        self._text += text
        name = None
        if self.name is None:
            head = FORCED.match(self._text)
            if head is None:
                return None, ""
            name = self.name = str(json.loads(head[1]))
            self._position = head.end()
        bare = self._text.rstrip()
        end = len(bare) - 1 if bare.endswith("}") and (not final or is_json(bare)) else len(self._text)
        start, self._position = self._position, max(self._position, end)
        return name, self._text[start : self._position]


def strict_json(text: str) -> Any:
    """JSON and nothing beyond it. Raises ValueError."""
    return json.loads(text, parse_constant=_refuse)


def is_json(text: str) -> bool:
    try:
        strict_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
