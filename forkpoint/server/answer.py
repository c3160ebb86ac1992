"""Parses the text of an answer, while it comes, into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, TypeAlias

import regex

from forkpoint.params import THINK, THINK_END
from forkpoint.server.calls.incoming import Incoming
from forkpoint.server.calls.json_calls import HEAD, string_value
from forkpoint.server.calls.json_text import JsonText
from forkpoint.server.calls.reader import CallsReader, Notation
from forkpoint.server.calls.site import Event, Named, WithResult
from forkpoint.server.notations import QWEN

WORD_END = regex.compile(r"[\w.-]")
MAX_SPACE = 200  # characters of white space that are held back because a tag may follow
# States of the parser. LIST: content after an opening tag with a list that was not understood; calls need no tag there.
REASONING, CONTENT, LIST = "reasoning", "content", "list"
QUOTES: Final = '`"'


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote while it was thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself, and the positions of the answer from which it comes."""

    text: str
    positions: tuple[range, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of the tool call number `index` of an answer. `text` is a part of the arguments' JSON.

    Only the first part of a call has a name.
    """

    index: int
    name: str | None
    text: str


Piece: TypeAlias = Reasoning | Content | CallPart


class AnswerParser:
    """Turns text, fed as it comes, into pieces. Text that may belong to a tag or a call is held back until it is clear.

    Tags of thinking, and calls, change between reasoning and content; `_free` is this loop. A call ends the reasoning.
    A call of a declared function is certain once its name and the beginning of its arguments have come, and is reported
    from then on. It cannot be taken back, so if it breaks off, its arguments are closed to valid JSON. A call of
    another function is reported once it is whole; if it breaks off, it is text.

    `reasoning`: separate `<think>` parts from the content. `starts_inside`: the prompt has opened such a part. `tools`:
    parameter schemas by function name; None to look for no calls. `notation`: how the model writes calls. `forced`: the
    answer is one call in JSON, which a grammar enforces. `written`: the answer is the text of a call of this function,
    which a grammar enforces. `single`: report nothing after the first call.
    """

    def __init__(
        self,
        *,
        reasoning: bool = False,
        starts_inside: bool = False,
        tools: Mapping[str, Any] | None = None,
        notation: Notation = QWEN,
        forced: bool = False,
        written: str | None = None,
        single: bool = False,
    ) -> None:
        self.num_calls = 0
        self.num_held = 0  # characters since the last piece; the next text may make the parser read them again
        self.in_reasoning = reasoning and starts_inside
        self.done = False  # nothing more will be reported, whatever text may come
        self.num_unopened = 0  # characters of content before a line with `</think>` but without a `<think>` before it
        self._num_content = 0  # characters of content that were reported
        self._was_reasoning = self.in_reasoning
        self._reasoning_start = 0  # position in the answer at which the current reasoning began
        self._reasoned: list[range] = []  # positions of the reasoning that has ended
        self._source = Incoming()
        self._notation = notation
        self._single = single
        self._written = written
        self._calls: CallsReader | None = None
        if tools is not None and not forced:
            self._calls = CallsReader(notation, self._source, tools)
        self._triggers = {state: self._trigger(state, reasoning) for state in (REASONING, CONTENT, LIST)}
        self._in_list = False  # an opening tag has come whose calls were not understood
        self._num_quoted = 0  # open `<think>` tags that the content only talks about
        self._begin_segment()
        self._parts = self._forced(reasoning) if forced else self._free(reasoning)

    def feed(self, text: str) -> list[Piece]:
        """Return the joined pieces that became certain with `text`; [] once `done`."""
        if self.done:
            return []
        self._source.append(text)
        parts: list[Piece] = []
        for part in self._parts:
            if part is None:
                break
            parts.append(part)
        self.num_held += len(text)
        if parts:
            self.num_held = self._source.num_unread
        return joined(parts)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """Return the remaining pieces, after the last `feed`.

        `cut`: the length limit ended the answer, so an unfinished call stays open.
        """
        self._source.finish(cut=cut)
        return self.feed("")

    def _trigger(self, state: str, reasoning: bool) -> regex.Pattern[str] | None:
        """Return the pattern that ends a stretch of text in `state`, or None if nothing can end it."""
        groups = [f"(?P<think_end>{THINK_END})"] * reasoning
        groups += [f"(?P<think>{THINK})"] * (reasoning and state != REASONING)
        if self._calls is not None:
            groups.append(f"(?P<opening>{regex.escape(self._notation.opening)})")
            groups += [f"(?P<tag>{'|'.join(map(regex.escape, self._notation.tags))})"] * bool(self._notation.tags)
            names = "|".join(map(regex.escape, self._calls.functions.names))
            if state == LIST:
                groups.append(rf"(?P<item>\{{|(?:{names})\()")
            elif state == CONTENT and self._notation.bare is not None:
                groups.append(f"(?P<bare>{self._notation.bare})")
        if not groups:
            return None
        return regex.compile("|".join(groups))

    def reasoning(self) -> list[range]:
        """Return the positions of the answer's characters, as far as it is read, at which the model was thinking.

        They are the same for all ways of feeding the text, and count content that turned out to be thinking.
        """
        if self.in_reasoning:
            return [*self._reasoned, range(self._reasoning_start, self._source.position)]
        return self._reasoned

    @property
    def _state(self) -> str:
        if self.in_reasoning:
            return REASONING
        if self._in_list:
            return LIST
        return CONTENT

    # --- generators, which yield None when they need more text

    def _free(self, reasoning: bool) -> Iterator[Piece | None]:
        yield from self._begin(reasoning)
        while not self.done:
            found = yield from self._text()
            if found is None:
                return
            kind = found.lastgroup
            space, tag = self._source.take(found.start()), self._source.take(found.end())
            if kind == "think_end":
                yield from self._end_thinking(space, tag)
            elif kind == "think":
                yield from self._think_again(space, tag)
            else:
                yield from self._read_calls(kind or "", space, tag)

    def _begin(self, reasoning: bool) -> Iterator[None]:
        """Read the tag that begins the reasoning, which may come although the prompt has it already."""
        if not reasoning:
            return
        if (yield from self._source.skip_tag((THINK,))):
            self._begin_reasoning()
        if self.in_reasoning:
            yield from self._trim("\n")

    def _text(self) -> Generator[Piece | None, None, regex.Match[str] | None]:
        """Report text up to a trigger and return the trigger's match, or None at the end of the answer.

        The white space before the trigger is not read yet.
        """
        source = self._source
        while True:
            pattern = self._triggers[self._state]
            found, end = None, len(source.text)
            if pattern is not None:
                found = pattern.search(source.text, source.at, partial=not source.final)
            if found is not None:
                end = found.start()
            before = source.text[source.at : end]
            is_found = found is not None and not found.partial
            certain = len(before)
            if pattern is not None and (is_found or not source.final):
                certain = max(len(before.rstrip()), len(before) - MAX_SPACE)
            if certain:
                yield self._report(source.take(source.at + certain))
            if is_found:
                return found
            if source.final:
                return None
            yield None

    def _report(self, text: str, *, num_dropped: int = 0) -> Piece:
        """Return `text`, which is not empty, as reasoning or content, whichever is being read.

        It was read last, but for the `num_dropped` characters that follow it.

        Remembers what the meaning of later tags depends on: the last character, the quotation marks in this stretch,
        and the number of characters of content.
        """
        self._last = text[-1]
        for quote in QUOTES:
            self._quotes[quote] += text.count(quote)
        if self.in_reasoning:
            return Reasoning(text)
        self._num_content += len(text)
        end = self._source.position - num_dropped
        return Content(text, (range(end - len(text), end),))

    def _begin_reasoning(self) -> None:
        self.in_reasoning = self._was_reasoning = True
        self._reasoning_start = self._source.position

    def _end_reasoning(self, position: int) -> None:
        self.in_reasoning = False
        self._reasoned.append(range(self._reasoning_start, position))

    def _begin_segment(self) -> None:
        self._last = ""  # the last character of this stretch of reasoning or content
        self._quotes = dict.fromkeys(QUOTES, 0)

    def _trim(self, characters: str) -> Iterator[None]:
        """Drop `characters` at the beginning of the text that follows."""
        source = self._source
        while True:
            rest = len(source.text[source.at :].lstrip(characters))
            source.at = len(source.text) - rest
            if rest or source.final:
                return
            yield None

    def _end_thinking(self, space: str, tag: str) -> Iterator[Piece | None]:
        """Handle `</think>`: it ends the reasoning, is text that talks about the tag, or is dropped as one too many."""
        if self.in_reasoning:
            self._end_reasoning(self._source.position - len(tag))
            self._begin_segment()
            yield from self._trim("\n")
        elif self._num_quoted or (not space and (yield from self._is_quoted())):
            self._num_quoted = max(self._num_quoted - 1, 0)
            yield self._report(space + tag)
        elif not self._last:
            yield from self._trim("\n")
        else:
            yield from self._drop_end(space, self._source.position - len(tag))

    def _drop_end(self, space: str, position: int) -> Iterator[Piece | None]:
        """Drop a `</think>` in the content at this position, and report the white `space` before it.

        If no `<think>` and no call has come, and a line break is before or after the tag, all content so far was
        thinking: `num_unopened` becomes its length. Nothing that was reported changes; the caller decides.
        """
        if not self._was_reasoning and not self.num_calls and self.num_unopened == 0:
            yield from self._source.more()
            if "\n" in space or self._source.text.startswith("\n", self._source.at):
                self.num_unopened = self._num_content
                self._reasoned.append(range(position))
        if space:
            yield self._report(space, num_dropped=self._source.position - position)

    def _is_quoted(self) -> Generator[None, None, bool]:
        """Return whether the tag that was just read is in quotation marks."""
        if self._last not in self._quotes or self._quotes[self._last] % 2 == 0:
            return False
        yield from self._source.more()
        return self._source.text.startswith(self._last, self._source.at)

    def _think_again(self, space: str, tag: str) -> Iterator[Piece | None]:
        """Handle `<think>` in the content: at the start of a line it begins reasoning again, elsewhere it is text."""
        if not self._last or "\n" in self._last + space:
            self._begin_reasoning()
            self._begin_segment()
            yield from self._trim("\n")
        else:
            self._num_quoted += 1
            yield self._report(space + tag)

    def _read_calls(self, kind: str, space: str, tag: str) -> Iterator[Piece | None]:
        """Read the calls that may begin at `tag`, a match of the group `kind`. If there are none, report it as text."""
        assert self._calls is not None
        number, position = 0, self._source.position - len(tag)
        if kind in ("opening", "tag") or self._may_begin(kind, space):
            self._source.mark()
            if kind != "opening":
                self._source.at -= len(tag)
            bare, item = kind in ("tag", "bare"), kind == "item"
            reading = self._calls.read(bare=bare, in_list=item, single=self._single, in_thinking=self.in_reasoning)
            number = yield from self._events(reading, position)
            if number:
                self._source.unmark()
            else:
                self._source.rewind()
        if number == 0:
            self._in_list |= kind == "opening" and self._notation.lists
            yield self._report(space + tag)
            return
        self.done = self._single
        self._in_list = False
        self._begin_segment()
        yield from self._trim(" \n")

    def _may_begin(self, kind: str, space: str) -> bool:
        """Return whether a call without a tag may begin here."""
        if kind == "item":
            return bool(space) or not WORD_END.match(self._last)
        return not self._notation.bare_at_start or not self._last

    def _events(self, reading: Generator[Event | None, None, int], position: int) -> Generator[Piece | None, None, int]:
        """Report calls as pieces and return their number. The first one, at this position, ends the reasoning."""
        events = WithResult(reading)
        for event in events:
            if event is None:
                yield None
            elif isinstance(event, Named):
                if self.in_reasoning:
                    self._end_reasoning(position)
                self.num_calls += 1
                yield CallPart(self.num_calls - 1, event.function, "")
            elif event:
                yield CallPart(self.num_calls - 1, None, event)
        return events.result

    def _forced(self, reasoning: bool) -> Iterator[Piece | None]:
        """Read reasoning, if there is any, and at most one call.

        The grammar completes the arguments, so they are not closed here. A call that is cut off before its name is
        certain is not reported.
        """
        yield from self._begin(reasoning)
        while self.in_reasoning:
            found = yield from self._text()
            if found is None:
                return
            space, tag = self._source.take(found.start()), self._source.take(found.end())
            yield from self._end_thinking(space, tag)
        if self._written is not None:
            self.num_calls = 1
            yield CallPart(0, self._written, "")
            while (yield from self._source.more()):
                yield CallPart(0, None, self._source.take(len(self._source.text)))
            return
        yield from self._source.skip_space()
        head = yield from self._source.matched(HEAD)
        if head is None:
            return
        self._source.at = head.end()
        self.num_calls = 1
        yield CallPart(0, string_value(head["name"]), "")
        for part in JsonText().read(self._source):
            if part != "":
                yield part if part is None else CallPart(0, None, part)


def with_unopened_reasoning(pieces: list[Piece], num_unopened: int) -> list[Piece]:
    """Return a whole answer's pieces, with the first `num_unopened` characters of content as reasoning.

    In a stream these characters are content: they are sent before the tag comes that shows what they are.
    """
    changed: list[Piece] = []
    for piece in joined(pieces):
        if isinstance(piece, Content) and num_unopened:
            changed += [Reasoning(piece.text[:num_unopened]), Content(piece.text[num_unopened:].lstrip("\n"))]
            num_unopened = 0
        else:
            changed.append(piece)
    return changed


def joined(parts: list[Piece]) -> list[Piece]:
    """Return the parts with consecutive ones of the same kind of text, or of the same call, joined."""
    runs: list[list[Piece]] = []
    for part in parts:
        begins_call = isinstance(part, CallPart) and part.name is not None
        if not runs or begins_call or type(part) is not type(runs[-1][0]):
            runs.append([])
        runs[-1].append(part)
    return list(map(_merged, runs))


def _merged(parts: list[Piece]) -> Piece:
    """Return parts of one kind of text, or of one call, as one piece."""
    text = "".join(part.text for part in parts)
    positions = [part.positions for part in parts if isinstance(part, Content)]
    if positions:
        return Content(text, tuple(chain.from_iterable(positions)))
    return replace(parts[0], text=text)
