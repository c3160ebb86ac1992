"""What the readers of calls share: the text to read, the declared functions, and what they report."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

from forkpoint.server.calls.incoming import Ending, Incoming
from forkpoint.server.calls.schema_types import Functions


@dataclass(frozen=True, slots=True)
class Named:
    """A call of a function begins; parts of its arguments, which are JSON, follow as strings."""

    function: str


Event: TypeAlias = Named | str
# Reads one call: yields its events, and None where it needs more text. Returns whether the call was written in full. A
# reader that finds no call returns False without having named one.
CallReader: TypeAlias = Generator[Event | None, None, bool]


@dataclass(frozen=True, slots=True)
class Site:
    """The place in an output where calls are read.

    `stop`: the text at which a string that never ends is given up. `strict_stop`: the same for a text that may turn out
    not to be a call. `needs_arguments`: an object without arguments is not a call, because no tag says that it is one.
    """

    source: Incoming
    functions: Functions
    stop: Ending
    strict_stop: Ending
    opening: str
    needs_arguments: bool = False

    def resolve(self, written: str) -> tuple[str, bool]:
        """Return the function that `written` names, and whether it is declared."""
        declared = self.functions.declared(written)
        return declared or written, declared is not None


ReadCall: TypeAlias = Callable[[Site], CallReader]
