"""One engine for several callers, in one thread or in many: whoever steps it does so for all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from forkpoint.engine.engine import Engine
from forkpoint.engine.inputs import Prompt
from forkpoint.engine.outputs import RequestState
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams

T = TypeVar("T")


class Caller:
    """The open requests of one call, and those of its requests that have news. Written by SharedEngine."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.news: dict[str, RequestState] = {}


class SharedEngine:
    """Each call of a method is done as a whole before another thread's; threads that wait take turns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._callers: dict[str, Caller] = {}  # of open requests
        self._left: deque[Caller] = deque()  # whose requests are to be aborted

    @contextmanager
    def held(self) -> Iterator[Engine]:
        """The engine, which no other thread uses meanwhile."""
        with self._turn:  # or a thread that steps again and again would keep the others out
            self._lock.acquire()
        try:
            yield self._engine
            self._abort_left()
        finally:
            self._lock.release()
            self._settle()

    def add(self, caller: Caller, prompt: Prompt, params: SamplingParams, priority: int = 0) -> str:
        """Queue a request of a caller's; raises what `Engine.add_request` raises."""
        with self.held() as engine:
            request_id = engine.add_request(prompt, params, priority=priority)
            caller.open.add(request_id)
            self._callers[request_id] = caller
            return request_id

    def news(self, caller: Caller, told: Callable[[RequestState], T]) -> list[T]:
        """`told` of each of a caller's requests that has news; a step is made if none has."""
        with self.held() as engine:
            if not caller.news and (caller.open or engine.has_unfinished()):
                for state in engine.advance():
                    self._note(state)
            found, caller.news = caller.news, {}
            return [told(state) for state in found.values()]

    def abort(self, caller: Caller) -> list[RequestOutput]:
        """End what is open of a caller's."""
        with self.held():
            return self._abort(caller)

    def leave(self, caller: Caller) -> None:
        """End what is open of a caller's, now or when whoever has the engine lets go of it: it may be this thread, in
        which a generator is collected in the middle of a step."""
        if caller.open:
            self._left.append(caller)
            self._settle()

    def _note(self, state: RequestState) -> None:
        caller = self._callers[state.request_id]
        caller.news[state.request_id] = state
        if state.finished:
            caller.open.discard(state.request_id)
            del self._callers[state.request_id]

    def _settle(self) -> None:
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
            self._engine.core.drain()  # nobody is left to take in the results of steps in flight
        return outputs
