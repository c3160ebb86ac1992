"""The text of an answer taken apart as it comes: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from forkpoint.server.notations import QWEN
from forkpoint.server.tool_call import NO_CALL, CallReader, ForcedCallReader, Notation

THINK, THINK_END = "<think>", "</think>"


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
        self._tools = tools
        self._notation = notation
        self._single = single
        self._buffer = ""
        self._trim = ""  # characters dropped at the start of what follows
        self._opening = ""  # the tag of the call being read, and the white space before it
        self._reader = CallReader(notation, tools or {})
        self._forced = ForcedCallReader()
        self.num_calls = 0
        # What reads the text that comes next; each puts another in its place where its part has ended.
        self._read: Callable[[bool], Iterator[Piece]] = self._start if reasoning else self._content
        if reasoning and starts_inside:
            self._enter_reasoning()
        if forced:
            self._read = self._forced_call

    @property
    def done(self) -> bool:
        """Whatever may come, nothing more will be told."""
        return self._read == self._nothing

    @property
    def in_reasoning(self) -> bool:
        return self._read == self._reasoning

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain with `text`."""
        self._buffer += text
        return list(self._run(final=False))

    def finish(self) -> list[Piece]:
        """What is left when no more text comes."""
        return list(self._run(final=True))

    def _run(self, final: bool) -> Iterator[Piece]:
        while True:
            read = self._read
            self._buffer = self._buffer.lstrip(self._trim) if self._trim else self._buffer
            if self._buffer:
                self._trim = ""
            yield from read(final)
            if self._read == read:
                return

    def _start(self, final: bool) -> Iterator[Piece]:
        yield from ()
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._enter_reasoning()
        elif final or not THINK.startswith(text):
            self._read = self._content

    def _enter_reasoning(self) -> None:
        self._read, self._trim = self._reasoning, "\n"

    def _reasoning(self, final: bool) -> Iterator[Piece]:
        text, _, found = self._until(THINK_END, final)
        if text:
            yield Reasoning(text)
        if found:
            self._read, self._trim = self._content, "\n"

    def _content(self, final: bool) -> Iterator[Piece]:
        if self._tools is None:
            text, space, found = self._buffer, "", False
            self._buffer = ""
        else:
            text, space, found = self._until(self._notation.opening, final)
        if text:
            yield Content(text)
        if found:
            self._read, self._opening = self._call, space + self._notation.opening
            self._reader = CallReader(self._notation, self._tools or {})

    def _call(self, final: bool) -> Iterator[Piece]:
        text, self._buffer = self._buffer, ""
        try:
            found = self._reader.feed(text, final)
        except NO_CALL:  # what follows the tag is read as the text that it is
            text = self._reader.text
            # Without a closing tag only what the last opening one begins can be whole: it may lack its own.
            tags = self._notation
            plain = len(text[: max(text.rfind(tags.opening), 0)].rstrip()) if final and tags.closing not in text else 0
            yield Content(self._opening + text[:plain])
            self._buffer, self._read = text[plain:], self._content
            return
        if found is None:
            return
        calls, self._buffer = found
        for call in calls[:1] if self._single else calls:
            yield CallPart(self.num_calls, call.name, call.arguments)
            self.num_calls += 1
        self._trim = " \n"
        self._read = self._nothing if self._single else self._content

    def _forced_call(self, final: bool) -> Iterator[Piece]:
        """One call at most; what is cut off before its name is certain is no text that anybody asked for."""
        text, self._buffer = self._buffer, ""
        name, arguments = self._forced.feed(text, final)
        if name is not None or arguments:
            self.num_calls = 1
            yield CallPart(0, name, arguments)

    def _nothing(self, final: bool) -> Iterator[Piece]:
        self._buffer = ""
        yield from ()

    def _until(self, tag: str, final: bool) -> tuple[str, str, bool]:
        """Take the text before `tag` from the buffer: (text, the white space between it and the tag, whether the
        tag was there; it is taken too). White space that may come before a tag waits at the end of the buffer."""
        at = self._buffer.find(tag)
        if at >= 0:
            before, self._buffer = self._buffer[:at], self._buffer[at + len(tag) :]
            text = before.rstrip()
            return text, before[len(text) :], True
        end = len(self._buffer) if final else _certain_length(self._buffer, tag)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text, "", False


def _certain_length(text: str, tag: str) -> int:
    """Length of `text` without white space, or the beginning of `tag` with white space before it, at its end."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-size:]):
            return len(text[:-size].rstrip())
    return len(text.rstrip())
