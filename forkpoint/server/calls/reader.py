"""Reads consecutive calls in one notation."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from forkpoint.server.calls.incoming import END, Ending, Incoming
from forkpoint.server.calls.schema_types import Functions
from forkpoint.server.calls.site import Event, Named, ReadCall, Site, WithResult

SPACE = r"\s{0,100}"
AFTER_CALL = Ending.compile(rf"[^\S\n]{{0,100}}(?:[,;\]{{<\n]|{END})")


@dataclass(frozen=True, slots=True)
class Notation:
    """The way in which a model family writes calls.

    `opening` and `closing`: tags around calls. `closings`: further tags that end calls. `read`: reads one call.
    `tags`: tags that begin a call whose opening tag is missing. `bare`: a pattern that begins a call of a declared
    function in the content without any tag. `bare_at_start`: such a call is possible only at the start of the content.
    `lists`: several calls may be in square brackets. `repeats`: the model may write calls a second time, without the
    opening tag.
    """

    opening: str
    closing: str
    read: ReadCall
    closings: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    bare: str | None = None
    bare_at_start: bool = False
    lists: bool = False
    repeats: bool = False


class CallsReader:
    """Reads calls in one notation from `source`. `schemas` are the declared functions' parameters, by name."""

    def __init__(self, notation: Notation, source: Incoming, schemas: Mapping[str, Any]) -> None:
        self.functions = Functions(schemas)
        self._notation = notation
        self._source = source
        opening, closing = regex.escape(notation.opening), regex.escape(notation.closing)
        begins = "|".join([rf"{opening}{SPACE}[\[{{<]", *map(regex.escape, notation.tags)])
        over = f"{closing}{SPACE}(?:{begins}|{END})"
        inner: regex.Pattern[str] | None = None
        if closing:
            inner = regex.compile(rf"(?P<begin>{opening}{SPACE}[\[{{<])|(?P<end>{closing})")
        strict = Ending.compile(f"{over}|{opening}")
        self._tagged = Site(source, self.functions, Ending.compile(over), strict, opening, inner)
        never = Ending.compile("(?!)")
        self._bare = Site(source, self.functions, never, never, opening, needs_arguments=True)
        self._closings = tuple(filter(None, (notation.closing, *notation.closings)))

    def read(
        self, *, bare: bool = False, in_list: bool = False, single: bool = False, in_thinking: bool = False
    ) -> Generator[Event | None, None, int]:
        """Read calls and the tags that end them, and return their number. Even if it is 0, text may have been read.

        `bare`: no tag has come, so only calls of declared functions count. `in_list`: the call is in a list whose
        earlier calls were not understood. `single`: read one call only. `in_thinking`: the first call counts only if
        its function is declared, because models also think about calls that they do not make.
        """
        source, calls = self._source, list[Event]()
        number = 0
        while number == 0 or not single:
            source.mark()
            in_list |= yield from self._before_call(number, in_list)
            is_call = yield from self._call(bare, calls, declared=bare or (in_thinking and number == 0))
            if not is_call:
                source.rewind()
                break
            source.unmark()
            number += 1
        if number and not single:
            yield from self._after_calls(in_list)
            if self._notation.repeats:
                yield from self._skip_repeated(calls)
        return number

    def _before_call(self, number: int, in_list: bool) -> Generator[None, None, bool]:
        """Read the text before call `number`, and return whether a list begins."""
        source = self._source
        yield from source.skip_space()
        if number and source.text.startswith((",", ";"), source.at):
            source.at += 1
            yield from source.skip_space()
        if self._notation.lists and not in_list and source.text.startswith("[", source.at):
            source.at += 1
            yield from source.skip_space()
            return True
        return False

    def _call(self, bare: bool, calls: list[Event], *, declared: bool) -> Generator[Event | None, None, bool]:
        """Read one call, and return whether there is one. Its reported events are appended to `calls`.

        A call of a declared function is reported while it comes, another call once it is whole. `declared`: another
        call is not a call.
        """
        held: list[Event] = []
        is_certain = False
        reading = WithResult(self._notation.read(self._bare if bare else self._tagged))
        for event in reading:
            if event is None:
                yield None
                continue
            is_certain |= isinstance(event, Named) and self.functions.declared(event.function) is not None
            held.append(event)
            if is_certain:
                yield from held
                calls += held
                held = []
        if is_certain:
            return True
        if reading.result and held and not declared and (yield from self._source.matched(AFTER_CALL)) is not None:
            yield from held
            calls += held
            return True
        return False

    def _after_calls(self, in_list: bool) -> Generator[None, None, None]:
        if in_list:
            yield from self._source.skip_tag(("]",))
        while self._closings and (yield from self._source.skip_tag(self._closings)):
            pass

    def _skip_repeated(self, calls: list[Event]) -> Generator[Event | None, None, None]:
        """Skip a repetition of `calls`, if one follows with the closing tag but without the opening tag."""
        source = self._source
        source.mark()
        yield from source.skip_space()
        again: list[Event] = []
        if source.text.startswith("[", source.at):
            number = 0
            while True:
                yield from self._before_call(number, number > 0)
                reading = self._call(False, again, declared=False)
                is_call = yield from _silently(reading)
                if not is_call:
                    break
                number += 1
            yield from source.skip_tag(("]",))
        if again and joined(again) == joined(calls) and (yield from source.skip_tag((self._notation.closing,))):
            source.unmark()
        else:
            source.rewind()


def _silently(reading: Generator[Event | None, None, bool]) -> Generator[None, None, bool]:
    """Run `reading` to its end without reporting its events, and return its result."""
    events = WithResult(reading)
    for event in events:
        if event is None:
            yield None
    return events.result


def joined(events: list[Event]) -> list[tuple[str, str]]:
    """Return the name and the arguments' JSON of each call."""
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, Named):
            calls.append((event.function, []))
        else:
            calls[-1][1].append(event)
    return [(name, "".join(arguments)) for name, arguments in calls]
