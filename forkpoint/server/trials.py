"""Trial compilation of grammars in a reader, which can be killed, before the engine compiles them."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from starlette.types import Receive

from forkpoint.engine.async_engine import AsyncEngine
from forkpoint.errors import InvalidParamsError, RequestFailedError, RequestTooLargeError
from forkpoint.params import OUTPUT_WORDS, StructuredOutputsParams
from forkpoint.server.lanes import Lane
from forkpoint.server.readers import NICENESS, Readers
from forkpoint.server.sse import unless_left
from forkpoint.server.texts import Texts

MAX_COMPILE_S: Final = 2.0  # seconds of CPU time; the engine will need the same again
TIMEOUT_S: Final = 5.0  # wall-clock limit of a trial; longer than MAX_COMPILE_S, as the engine has priority
TURN_S: Final = 0.3  # length of a turn; a grammar that is still being compiled then makes room for another
NUM_AT_ONCE: Final = 3  # trials that have their turn at once
MAX_KEPT: Final = 256  # grammars remembered as compiling


class Trials:
    """Runs trials. Grammars that have passed one, and simple grammars, need no trial."""

    def __init__(self, engine: AsyncEngine, readers: Readers) -> None:
        self._engine = engine
        self._readers = readers
        self._lane = Lane(NICENESS, NUM_AT_ONCE, TIMEOUT_S, TURN_S)
        self._passed: dict[StructuredOutputsParams, None] = {}  # the oldest first

    async def check(self, wanted: StructuredOutputsParams | None, receive: Receive) -> None:
        """Raise HTTPError or InvalidParamsError if `wanted` does not compile, or takes too much time or memory.

        HTTPError also if the client leaves. Grammars that pass are remembered, the last MAX_KEPT ones.
        """
        if wanted is None or wanted in self._passed:
            return
        name = self._engine.inputs.grammars.slow_name(wanted)
        if name is None:
            return
        trial = self._readers.run(partial(compile_once, wanted), b"", lane=self._lane)
        try:
            await unless_left(receive, trial)
        except RequestTooLargeError as error:
            raise _too_slow(name) from error
        except RequestFailedError as error:
            raise InvalidParamsError(
                f"{OUTPUT_WORDS[name]} could not be compiled: its process ended, perhaps for lack of memory; "
                "make it smaller"
            ) from error
        self._passed[wanted] = None
        if len(self._passed) > MAX_KEPT:
            del self._passed[next(iter(self._passed))]


def _too_slow(name: str) -> InvalidParamsError:
    return InvalidParamsError(
        f"{OUTPUT_WORDS[name]} took more than {MAX_COMPILE_S:g} s to compile; make it smaller "
        "(fewer alternatives, shorter repetitions, less nesting)"
    )


def compile_once(wanted: StructuredOutputsParams, texts: Texts, data: bytes) -> None:
    """Compile a grammar. Raises InvalidParamsError if that fails or takes too long. Runs in a reader's process."""
    started_s = time.process_time()
    grammars = texts.inputs.grammars
    grammars.check(wanted)
    name = grammars.slow_name(wanted)
    if name is not None and time.process_time() - started_s > MAX_COMPILE_S:
        raise _too_slow(name)
