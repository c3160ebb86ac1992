"""The engine behind `LLM`: takes prompts, runs steps and returns outputs with texts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from forkpoint.engine.core import EngineCore
from forkpoint.engine.inputs import InputProcessor, Prompt
from forkpoint.engine.outputs import OutputAssembler, RequestState
from forkpoint.errors import RequestError
from forkpoint.outputs import RequestOutput
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.sched.request import Request
from forkpoint.sched.sizes import check_size


class Engine:
    """Tracks requests with their texts on top of an EngineCore, which works on token sequences. One thread calls it."""

    def __init__(self, core: EngineCore, inputs: InputProcessor) -> None:
        self.core = core
        self.inputs = inputs
        self._outputs = OutputAssembler(inputs.tokenizer, self._end)
        self._num_requests = 0
        self._unprepared: dict[str, RequestState] = {}  # open requests whose outputs have not been prepared

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise the RequestError that `add_request` would raise, except QueueFullError. Queues nothing."""
        for request in self._requests(prompt, params, 0):
            check_size(request, self.core.scheduler.cache)

    def add_request(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> str:
        """Queue one prompt with its `n` completions and return the request's id.

        Raises a RequestError, after which none of the completions is queued.
        """
        requests = self._requests(prompt, params, priority)
        try:
            for request in requests:
                self.core.add(request)
        except RequestError:
            for request in requests:
                self.core.scheduler.abort(request.id)
            raise
        self._num_requests += 1
        state = self._outputs.add(prompt, requests)
        self._unprepared[state.request_id] = state
        return state.request_id

    def _requests(self, prompt: Prompt, params: SamplingParams, priority: int) -> list[Request]:
        number, now = self._num_requests, time.perf_counter()
        name = f"req-{number}"
        requests = self.inputs.requests(name, prompt, params, priority=priority, number=number, arrival_s=now)
        for request in requests:
            request.grammar = self.inputs.grammars.start(request.params, request.stop_token_ids)
        return requests

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request with the output it has. Return that output, or None if the request is not open."""
        state = self._outputs.abort(request_id, time.perf_counter())
        self._unprepared.pop(request_id, None)
        return state.output() if state is not None else None

    def advance(self) -> list[RequestState]:
        """Run one step and return the requests with news. `state.output()` takes time in its length."""
        updates = self.core.step(self._prepare if self._unprepared else None)
        changed = self._outputs.apply(updates, time.perf_counter())
        for state in changed:
            if state.finished_s is not None:
                self._unprepared.pop(state.request_id, None)
        return changed

    def _end(self, sequences: Sequence[str], reason: FinishReason) -> None:
        for name in sequences:
            self.core.end(name, reason)

    def _prepare(self) -> None:
        """Prepare the prompt's ids of one request, for its outputs. `core.step` calls this while the device works."""
        self._unprepared.pop(next(iter(self._unprepared))).prepare()

    def has_unfinished(self) -> bool:
        return self.core.has_unfinished()
