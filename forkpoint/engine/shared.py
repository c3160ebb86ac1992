"""Shares one engine between several callers, in one thread or many. A step runs the requests of all callers."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from forkpoint.engine.engine import Engine
from forkpoint.engine.inputs import Prompt
from forkpoint.engine.outputs import RequestState
from forkpoint.errors import EngineStoppedError
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams

T = TypeVar("T")


class Caller:
    """The open requests of one call, and the requests that have news. Only SharedEngine writes it."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.news: dict[str, RequestState] = {}


class SharedEngine:
    """Serialises calls from several threads. Threads that wait take turns.

    The engine works only in the process that created it. A forked process has neither its threads nor its locks, and
    would take answers of the ranks that its parent waits for.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._pid = engine, os.getpid()
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._callers: dict[str, Caller] = {}  # by the id of each open request
        self._left: deque[Caller] = deque()  # callers whose requests have to be aborted

    @property
    def is_own(self) -> bool:
        """Whether this process created the engine."""
        return os.getpid() == self._pid

    @contextmanager
    def held(self) -> Iterator[Engine]:
        """Give this thread exclusive use of the engine, in its turn.

        At the end, requests of callers that left are ended, and prompts are copied for other engines, because there may
        be no later step. Raises EngineStoppedError in a forked process.
        """
        if not self.is_own:
            raise EngineStoppedError(
                f"this engine works only in process {self._pid}, which created it, and not in process {os.getpid()}, "
                "which was forked from that one; create an engine in each process"
            )
        with self._turn:  # otherwise a thread that steps repeatedly would keep the others out
            self._lock.acquire()
        try:
            yield self._engine
            self._abort_left()
            self._engine.core.send_copies()
        finally:
            self._lock.release()
            self._abort_if_free()

    def add(self, caller: Caller, prompt: Prompt, params: SamplingParams, priority: int = 0) -> str:
        """Queue a request of a caller and return its id. Raises what `Engine.add_request` raises."""
        with self.held() as engine:
            request_id = engine.add_request(prompt, params, priority=priority)
            caller.open.add(request_id)
            self._callers[request_id] = caller
            return request_id

    def next_news(self, caller: Caller, convert: Callable[[RequestState], T]) -> list[T]:
        """Return `convert(state)` for each request of a caller that has news; these are news no longer.

        Runs one step first if none has. Raises what the step raises.
        """
        with self.held() as engine:
            if not caller.news and (caller.open or engine.has_unfinished()):
                for state in engine.advance():
                    self._note(state)
            found, caller.news = caller.news, {}
            return [convert(state) for state in found.values()]

    def abort(self, caller: Caller) -> list[RequestOutput]:
        """End the open requests of a caller and return their outputs."""
        with self.held():
            return self._abort(caller)

    def leave(self, caller: Caller) -> None:
        """End the open requests of a caller, now or when the engine is free.

        The engine may be in use by this very thread, if a generator is collected in the middle of a step.
        """
        if caller.open and self.is_own:
            self._left.append(caller)
            self._abort_if_free()

    def _note(self, state: RequestState) -> None:
        caller = self._callers[state.request_id]
        caller.news[state.request_id] = state
        if state.finished:
            caller.open.discard(state.request_id)
            del self._callers[state.request_id]

    def _abort_if_free(self) -> None:
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._abort_left()
            finally:
                self._lock.release()

    def _abort_left(self) -> None:
        while self._left:
            self._abort(self._left.popleft())

    def _abort(self, caller: Caller) -> list[RequestOutput]:
        outputs = []
        for request_id in sorted(caller.open):
            del self._callers[request_id]
            output = self._engine.abort(request_id)
            if output is not None:
                outputs.append(output)
        caller.open.clear()
        caller.news.clear()
        if not self._callers:
            self._engine.core.drain()  # nobody is left to read the results of steps in flight
        return outputs
