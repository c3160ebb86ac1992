"""The text of an answer taken apart as it comes: reasoning, content, tool calls."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from forkpoint.server.tool_call import ToolCallReader

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


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


@enum.unique
class _Place(enum.Enum):
    START = "start"
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


class AnswerParser:
    """Feed it text as it comes. Text that may turn out to be a tag is held back until that is decided.

    `reasoning`: tell `<think>` parts from the rest; `starts_inside`: the prompt has opened one already.
    `tools`: parameter schemas by name of the function, None where calls are not looked for. `forced`: the
    whole answer is one call without its tags.
    """

    def __init__(
        self,
        *,
        reasoning: bool = False,
        starts_inside: bool = False,
        tools: Mapping[str, Any] | None = None,
        forced: bool = False,
    ) -> None:
        self._tools = tools
        self._buffer = ""
        self._trim = ""  # characters dropped at the start of what follows
        self._reader: ToolCallReader | None = None
        self._forced = forced
        self.num_calls = 0
        self._place = _Place.START if reasoning else _Place.CONTENT
        if reasoning and starts_inside:
            self._enter_reasoning()
        if forced:
            self._enter_call()

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain with `text`."""
        self._buffer += text
        return list(self._run(final=False))

    def finish(self) -> list[Piece]:
        """What is left when no more text comes."""
        return list(self._run(final=True))

    def _run(self, final: bool) -> Iterator[Piece]:
        while True:
            place = self._place
            self._buffer = self._buffer.lstrip(self._trim) if self._trim else self._buffer
            if self._buffer:
                self._trim = ""
            match place:
                case _Place.START:
                    self._start(final)
                case _Place.REASONING:
                    yield from self._reasoning(final)
                case _Place.CONTENT:
                    yield from self._content(final)
                case _Place.CALL:
                    yield from self._call(final)
            if self._place is place:
                return

    def _start(self, final: bool) -> None:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._enter_reasoning()
        elif final or not THINK.startswith(text):
            self._place = _Place.CONTENT

    def _enter_reasoning(self) -> None:
        self._place, self._trim = _Place.REASONING, "\n"

    def _enter_call(self) -> None:
        assert self._tools is not None
        self._place = _Place.CALL
        self._reader = ToolCallReader(self._tools, None if self._forced else CALL_END)

    def _reasoning(self, final: bool) -> Iterator[Piece]:
        text, found = self._until(THINK_END, final)
        if text:
            yield Reasoning(text)
        if found:
            self._place, self._trim = _Place.CONTENT, "\n"

    def _content(self, final: bool) -> Iterator[Piece]:
        if self._tools is None:
            text, found = self._buffer, False
            self._buffer = ""
        else:
            text, found = self._until(CALL, final)
        if text:
            yield Content(text)
        if found:
            self._enter_call()

    def _call(self, final: bool) -> Iterator[Piece]:
        reader = self._reader
        assert reader is not None
        rest = reader.feed(self._buffer, final)
        self._buffer = ""
        name, arguments = reader.take()
        if name is not None or arguments:
            yield CallPart(self.num_calls, name, arguments)
        if rest is None and not final:
            return
        if reader.name is not None:
            self.num_calls += 1
        elif reader.text:  # not a call after all
            yield Content(reader.text if self._forced else CALL + reader.text)
        self._reader, self._forced = None, False
        self._buffer = rest or ""
        self._place, self._trim = _Place.CONTENT, " \n"

    def _until(self, tag: str, final: bool) -> tuple[str, bool]:
        """Take the text before `tag` from the buffer; True: the tag was there, and is taken too. White space
        before a tag belongs to it, so that at the end of the buffer it waits."""
        at = self._buffer.find(tag)
        if at >= 0:
            text, self._buffer = self._buffer[:at].rstrip(), self._buffer[at + len(tag) :]
            return text, True
        end = len(self._buffer) if final else _certain_length(self._buffer, tag)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text, False


def _certain_length(text: str, tag: str) -> int:
    """Length of `text` without white space, or the beginning of `tag` with white space before it, at its end."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-size:]):
            return len(text[:-size].rstrip())
    return len(text.rstrip())
