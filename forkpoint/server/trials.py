"""Grammars are compiled once in a reader's process, which may be killed, before the engine compiles them."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from starlette.types import Receive

from forkpoint.engine.async_engine import AsyncEngine
from forkpoint.errors import InvalidParamsError, RequestFailedError, RequestTooLargeError
from forkpoint.params import StructuredOutputsParams
from forkpoint.server.lanes import Lane
from forkpoint.server.readers import NICENESS, Readers
from forkpoint.server.sse import unless_left
from forkpoint.server.texts import Texts

MAX_COMPILE_S: Final = 2.0  # of a core's time: the engine takes it again
TIMEOUT_S: Final = 5.0  # for the compiling, which has the engine's steps go first
TURN_S: Final = 0.3  # after which a grammar that is still being compiled makes room for another
NUM_AT_ONCE: Final = 3  # within their turn
MAX_KEPT: Final = 256  # of those that were found to compile


class Trials:
    """What was found to compile needs no further trial; what is simple needs none at all."""

    def __init__(self, engine: AsyncEngine, readers: Readers) -> None:
        self._engine = engine
        self._readers = readers
        self._lane = Lane(NICENESS, NUM_AT_ONCE, TIMEOUT_S, TURN_S)
        self._passed: dict[StructuredOutputsParams, None] = {}  # the oldest first

    async def check(self, wanted: StructuredOutputsParams | None, receive: Receive) -> None:
        """Raises HTTPError or InvalidParamsError for what cannot be compiled, or takes too long or too much memory."""
        if wanted is None or wanted in self._passed:
            return
        name = self._engine.inputs.grammars.slow_name(wanted)
        if name is None:
            return
        trial = self._readers.run(partial(compile_once, wanted), b"", self._lane)
        try:
            await unless_left(receive, trial)
        except RequestTooLargeError as error:
            raise _too_slow(name) from error
        except RequestFailedError as error:
            raise InvalidParamsError(
                f"structured_outputs.{name} could not be compiled: its process ended, which may mean that "
                "it takes too much memory; make it smaller"
            ) from error
        self._passed[wanted] = None
        if len(self._passed) > MAX_KEPT:
            del self._passed[next(iter(self._passed))]


def _too_slow(name: str | None) -> InvalidParamsError:
    return InvalidParamsError(
        f"structured_outputs.{name} took more than {MAX_COMPILE_S:g} s to compile; make it smaller "
        "(fewer alternatives, shorter repetitions, less nesting)"
    )


def compile_once(wanted: StructuredOutputsParams, texts: Texts, data: bytes) -> None:
    """Runs in a reader's process. Raises InvalidParamsError for what cannot be compiled, or takes too long."""
    started_s = time.process_time()
    grammars = texts.inputs.grammars
    grammars.check(wanted)
    if time.process_time() - started_s > MAX_COMPILE_S:
        raise _too_slow(grammars.slow_name(wanted))
