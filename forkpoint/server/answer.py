"""The text of an answer taken apart as it comes: reasoning, content, tool calls."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from forkpoint.params import THINK, THINK_END
from forkpoint.server.notations import FORCED, NO_CALL, QWEN, Body, Call, Notation, Tools, is_json


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """Part of the tool call number `index`; its first part has the name. The arguments are JSON text."""

    index: int
    name: str | None
    arguments: str


Piece: TypeAlias = Reasoning | Content | CallPart


class AnswerParser:
    """Feed it text as it comes. Text that may turn out to be a tag or a call is held back until that is decided.

    `reasoning`: tell `<think>` parts from the rest; `starts_inside`: the prompt has opened one already.
    `tools`: parameter schemas by name of the function, None where calls are not looked for. `notation`: how they are
    written. `forced`: the whole answer is one call without its tags. `single`: nothing is told after the first call.

    A call that has been told cannot be taken back. So one that the model writes freely is told when it is whole; one
    that a grammar enforces cannot break, and is told as it comes.
    """

    def __init__(
        self,
        *,
        reasoning: bool = False,
        starts_inside: bool = False,
        tools: Mapping[str, Any] | None = None,
        notation: Notation = QWEN,
        forced: bool = False,
        single: bool = False,
    ) -> None:
        self.num_calls = 0
        self.in_reasoning = reasoning and starts_inside
        self.done = False  # whatever may come, nothing more will be told
        self._tools = tools
        self._notation = notation
        self._single = single
        self._buffer = ""  # what has come and is not told yet
        self._final = False  # nothing more comes
        self._parts = self._read(reasoning, forced)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain with `text`."""
        self._buffer += text
        pieces = []
        for piece in self._parts:
            if piece is None:
                break
            pieces.append(piece)
        return pieces

    def finish(self) -> list[Piece]:
        """What is left when no more text comes."""
        self._final = True
        return self.feed("")

    # --- generators, which yield None where they need more text to go on

    def _read(self, reasoning: bool, forced: bool) -> Iterator[Piece | None]:
        if reasoning and (self.in_reasoning or (yield from self._takes(THINK))):
            self.in_reasoning = True
            yield from self._trim("\n")
            yield from self._until(THINK_END, Reasoning)
            self.in_reasoning = False
            yield from self._trim("\n")
        yield from self._forced_call() if forced else self._free()

    def _free(self) -> Iterator[Piece | None]:
        while self._tools is None:
            text, self._buffer = self._buffer, ""
            yield Content(text) if text else None
        opening = self._notation.opening
        while not self.done:
            space = yield from self._until(opening, Content)
            yield from self._calls(space + opening, self._tools)

    def _takes(self, tag: str) -> Generator[None, None, bool]:
        """Take `tag` off the beginning, and white space before it; False if the text begins otherwise."""
        while (text := self._buffer.lstrip()) != tag and tag.startswith(text) and not self._final:
            yield
        found = text.startswith(tag)
        if found:
            self._buffer = text.removeprefix(tag)
        return found

    def _trim(self, characters: str) -> Iterator[None]:
        """Drop characters at the beginning of what follows."""
        while not (rest := self._buffer.lstrip(characters)) and not self._final:
            yield
        self._buffer = rest

    def _until(self, tag: str, kind: type[Reasoning | Content]) -> Generator[Piece | None, None, str]:
        """Tell the text before `tag`, which is taken too; returns the white space between the two. White space that
        may come before a tag waits."""
        while tag not in self._buffer:
            end = len(self._buffer) if self._final else _certain_length(self._buffer, tag)
            text, self._buffer = self._buffer[:end], self._buffer[end:]
            if text:
                yield kind(text)
            yield None
        before, _, self._buffer = self._buffer.partition(tag)
        text = before.rstrip()
        if text:
            yield kind(text)
        return before[len(text) :]

    def _calls(self, opening: str, tools: Tools) -> Iterator[Piece | None]:
        """What follows the tag `opening`: calls, or the text that it is."""
        try:
            calls = yield from self._read_calls(tools)
        except NO_CALL:
            text, tags = self._buffer, self._notation
            # Without a closing tag only what the last opening one begins can be whole: it may lack its own.
            last = text.rfind(tags.opening) if self._final and tags.closing not in text else 0
            plain = text[: max(last, 0)].rstrip()
            self._buffer = text[len(plain) :]
            yield Content(opening + plain)
            return
        for call in calls[:1] if self._single else calls:
            self.num_calls += 1
            yield CallPart(self.num_calls - 1, call.name, call.arguments)
        self.done = self._single
        yield from self._trim(" \n")

    def _read_calls(self, tools: Tools) -> Generator[None, None, list[Call]]:
        """Take calls off the beginning, once they are whole. Their closing tag may be missing where the answer ends.
        Raises one of NO_CALL, and takes nothing, where they can no longer become any."""
        notation = self._notation
        while (head := notation.head.match(self._buffer, partial=not self._final)) and head.partial:
            yield
        if head is None:
            raise ValueError("no call begins like this")
        calls: list[Call] = []
        sought = head.end()  # up to where the text has been read, or the closing tag been looked for
        while not calls:
            end = self._buffer.find(notation.closing, sought)
            if end >= 0:
                calls = notation.read(Body(head, self._buffer[head.end() : end], tools, True))
                sought = end + len(notation.closing)
            elif self._final:
                calls = notation.read(Body(head, self._buffer[head.end() :], tools, False))
                sought = len(self._buffer)
                if not calls:
                    raise ValueError("the answer ends within a call")
            else:  # the tag may have come in part
                sought = max(sought, len(self._buffer) - len(notation.closing) + 1)
                yield
        self._buffer = self._buffer[sought:]
        if notation.section is not None:
            yield from self._end_in_section(*notation.section)
        return calls

    def _end_in_section(self, another: str, end: str) -> Iterator[None]:
        """Behind calls in a section: take its end off, or begin another call where one follows."""
        if (yield from self._takes(end)):
            return
        if (yield from self._takes(another)):
            self._buffer = self._notation.opening + another + self._buffer

    def _forced_call(self) -> Iterator[Piece | None]:
        """One call at most; what is cut off before its name is certain is no text that anybody asked for."""
        while (head := FORCED.match(self._buffer)) is None:
            yield None
        self.num_calls = 1
        name: str | None = json.loads(head[1])
        told = head.end()
        while True:
            # A bracket at the end may be the call's own: it waits for more, and is dropped from a whole call.
            bare = self._buffer.rstrip()
            waits = bare.endswith("}") and (not self._final or is_json(bare))
            end = max(told, len(bare) - 1 if waits else len(self._buffer))
            if name is not None or end > told:
                yield CallPart(0, name, self._buffer[told:end])
            name, told = None, end
            yield None


def _certain_length(text: str, tag: str) -> int:
    """Length of `text` without white space, or the beginning of `tag` with white space before it, at its end."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-size:]):
            return len(text[:-size].rstrip())
    return len(text.rstrip())
