"""Types that the readers of calls share: the text to read, the declared functions, and the reported events."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import regex

from forkpoint.server.calls.incoming import Ending, Incoming
from forkpoint.server.calls.json_text import JsonText
from forkpoint.server.calls.schema_types import Functions


@dataclass(frozen=True, slots=True)
class Named:
    """Reports the beginning of a call. The parts of its arguments, which are JSON, follow as strings."""

    function: str


Event: TypeAlias = Named | str
# Reads one call. Yields its events, and None when it needs more text. Returns whether the call was written in full. A
# reader that finds no call returns False without having yielded a Named.
CallReader: TypeAlias = Generator[Event | None, None, bool]
R = TypeVar("R")


class WithResult(Generic[R]):
    """Iterates over the events of a generator, and then has what the generator returned as `result`."""

    result: R

    def __init__(self, reading: Generator[Event | None, None, R]) -> None:
        self._reading = reading

    def __iter__(self) -> Iterator[Event | None]:
        self.result = yield from self._reading


@dataclass(frozen=True, slots=True)
class Site:
    """The text and the rules by which a reader reads a call.

    `stop`: text at which a string that never ends is given up. `strict_stop`: the same for what may be no
    call, such as one of a function that is not declared.
    `inner`: the tags that begin and end a call within a string, in the groups `begin` and `end`; None to ignore them.
    `needs_arguments`: an object without arguments is not a call, because no tag shows that it is one.
    """

    source: Incoming
    functions: Functions
    stop: Ending
    strict_stop: Ending
    opening: str
    inner: regex.Pattern[str] | None = None
    needs_arguments: bool = False

    def resolve(self, written: str) -> tuple[str, bool]:
        """Return the name of the function that a call means by `written`, and whether the function is declared."""
        declared = self.functions.declared(written)
        return declared or written, declared is not None

    def json(self, *, strict: bool) -> JsonText:
        """Return a reader of JSON within the call. `strict`: it may be no call; see `strict_stop`."""
        stop = self.stop
        if strict:
            stop = self.strict_stop
        return JsonText(stop, self.inner)


ReadCall: TypeAlias = Callable[[Site], CallReader]
