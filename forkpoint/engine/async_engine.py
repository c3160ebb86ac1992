"""The engine for asyncio programs. Texts are handled here. The step loop runs in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from forkpoint.cache.peer_offers import chosen_lease
from forkpoint.config import EngineConfig
from forkpoint.engine import messages
from forkpoint.engine.inputs import InputProcessor, Prompt
from forkpoint.engine.outputs import Observer, OutputAssembler, RequestState
from forkpoint.engine.supervisor import EngineProcess
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import EngineNotReadyError, EngineStoppedError, ForkpointError
from forkpoint.outputs import CompletionOutput
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.sched.request import Request, RequestUpdate

CALL_TIMEOUT_S = 30.0


class OpenRequest:
    """Prompts that are answered together. Iterate over `deltas`, then read `states`, one for each prompt."""

    def __init__(self) -> None:
        self.states: list[RequestState] = []
        self._news = asyncio.Event()
        self._error: ForkpointError | None = None

    def wake(self, error: ForkpointError | None = None) -> None:
        """Signal that there is news, or that `error` ended a prompt's request. AsyncEngine calls it."""
        self._error = self._error or error
        self._news.set()

    async def first_news(self) -> None:
        """Wait until a prompt has an output token, or has ended without one. Raises what `deltas` raises."""
        while True:
            await self._wait()
            if any(state.has_begun for state in self.states):
                return
            self._news.clear()

    async def deltas(self, *, whole: bool = False) -> AsyncIterator[list[tuple[int, CompletionOutput]]]:
        """Yield lists of (number of the prompt, news of a completion) as they come, until all prompts have ended.

        News are merged if the reader is slower than the engine. `whole`: yield all completions of a prompt at once,
        when it has ended. Raises the RequestError with which the engine refused a prompt, or EngineStoppedError.
        """
        running = dict(enumerate(self.states))
        while running:
            await self._wait()
            self._news.clear()
            found = [
                (number, delta)
                for number, state in running.items()
                if state.finished or not whole
                for completion in state.completions
                if (delta := completion.take_delta()) is not None
            ]
            running = {number: state for number, state in running.items() if not state.finished}
            if found:
                yield found

    async def _wait(self) -> None:
        await self._news.wait()
        if self._error is not None:
            raise self._error


class AsyncEngine:
    """Owns the engine process and converts its reports to texts. All methods belong to one event loop.

    `observer` hears of tokens, ends and refusals.
    """

    def __init__(self, config: EngineConfig, observer: Observer) -> None:
        self.config = config
        self._observer = observer
        self._process = EngineProcess(config, self._on_report, self._on_exit)
        self._inputs: InputProcessor | None = None
        self._outputs = OutputAssembler(None, self._end)
        self._open: dict[str, OpenRequest] = {}
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._died: ForkpointError | None = None
        self._loaded: asyncio.Future[messages.Ready] | None = None
        self._ended = asyncio.Event()
        self._is_full = False
        self.facts: dict[str, Any] = {}  # options and sizes that do not change

    # --- life

    async def start(self, texts: Awaitable[tuple[Tokenizer | None, frozenset[int]]]) -> None:
        """Start the process and wait until the model is loaded. Raises what loading, or `texts`, raised.

        `texts` yields the tokenizer that converts ids to text (None: outputs have only ids), and the ids that end a
        completion.
        """
        loop = asyncio.get_running_loop()
        self._loaded = loop.create_future()
        self._process.start(loop)
        tokenizer, ends = await texts
        ready = await self._loaded
        eos = frozenset(t for t in ends if t < ready.vocab_size)
        self._outputs = OutputAssembler(tokenizer, self._end, self._observer)
        self.facts = {
            **asdict(self.config.cache),
            "max_model_len": ready.max_model_len,
            "num_pages": ready.stats["num_pages"],
            "blocks_per_page": ready.stats["blocks_per_page"],
            "slots_per_page": ready.stats["slots_per_page"],
        }
        self._inputs = InputProcessor(tokenizer, ready.vocab_size, ready.max_model_len, eos, self.config.seed)

    async def ended(self) -> ForkpointError:
        """Wait until the engine process has ended without `close`, and return the reason."""
        await self._ended.wait()
        assert self._died is not None
        return self._died

    @property
    def is_ready(self) -> bool:
        return self._inputs is not None and self._died is None

    @property
    def num_open(self) -> int:
        """The number of prompts that are being answered."""
        return len(self._open)

    @property
    def num_sequences(self) -> int:
        """The number of completions, over all prompts, that have not ended."""
        return self._outputs.num_sequences

    @property
    def is_full(self) -> bool:
        """Whether the engine would have refused any request after its last step."""
        return self._is_full and self.num_sequences > 0  # steps do not report what was aborted later

    def check_ready(self) -> None:
        """Raise EngineNotReadyError while the model is loading, and the reason of the end after it."""
        if self._died is not None:
            raise self._died
        if self._inputs is None:
            raise EngineNotReadyError("the model is still loading; try again in a while")

    async def close(self) -> None:
        """End open requests with an error, then end the process. Calling it again does nothing."""
        self._end_all(EngineStoppedError("the server is shutting down"))
        await self._process.stop(gently=self._inputs is not None)

    @property
    def inputs(self) -> InputProcessor:
        self.check_ready()
        assert self._inputs is not None
        return self._inputs

    # --- requests

    def add(
        self, opened: OpenRequest, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Send one prompt with its `n` completions to the engine, as the next prompt of `opened`.

        Requests of a smaller `priority` run first. Raises InvalidParamsError, EngineNotReadyError or
        EngineStoppedError. Refusals of the engine itself (QueueFullError, RequestTooLargeError) are raised by
        `opened.first_news`.
        """
        now = time.perf_counter()
        number = next(self._numbers)
        requests = self.inputs.requests(request_id, prompt, params, priority=priority, number=number, arrival_s=now)
        opened.states.append(self._outputs.add(prompt, requests))
        self._open[request_id] = opened
        try:
            for request in requests:
                self._process.send(messages.AddSequence(request))
        except Exception:
            self.abort(request_id)  # sequences that were not sent would never end
            raise

    def abort(self, request_id: str) -> None:
        """End a request with the tokens it has, and wake its reader. Do nothing if it has ended."""
        state = self._outputs.abort(request_id, time.perf_counter())
        if state is not None:
            self._observer.finished(state)
            self._open.pop(request_id).wake()

    def end_offer(self, params: object) -> None:
        """End the offer of a request that is refused, so that no other engine waits for its prompt.

        `params` are its `kv_transfer_params`, which may be malformed.
        """
        lease = chosen_lease(params)
        if lease is not None and self.config.links_peers and self._died is None:
            self._process.send(messages.EndOffer(lease))

    async def call(self, name: Literal["stats", "reset_prefix_cache", "check_integrity"]) -> Any:
        """Call the engine between two steps and return what it answers: metrics by name, or None.

        Raises ForkpointError if the call failed or the engine is not ready, and EngineStoppedError if no answer comes
        within CALL_TIMEOUT_S.
        """
        self.check_ready()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._process.send(messages.Call(number, name))
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):  # Python 3.11's `wait_for` may lose a cancellation
                return await answer
        except TimeoutError:
            raise EngineStoppedError(f"the engine did not answer within {CALL_TIMEOUT_S:g} s") from None
        finally:
            self._calls.pop(number, None)

    # --- reports

    def _on_report(self, report: messages.Report) -> None:
        match report:
            case messages.StepReport():
                self._on_step(report)
            case messages.CallReply(number, value, failure):
                answer = self._calls.get(number)
                if answer is None or answer.done():
                    return
                if failure is not None:
                    answer.set_exception(failure.error())
                else:
                    answer.set_result(value)
            case messages.Ready():
                assert self._loaded is not None
                self._loaded.set_result(report)
            case messages.Died(failure):
                self._on_exit(failure.error())

    def _on_step(self, report: messages.StepReport) -> None:
        now = time.perf_counter()
        self._observer.step(report.num_tokens)
        self._is_full = report.is_full
        find = self._outputs.find
        for name, (num_drafts, num_accepted) in report.drafts.items():
            if found := find(name):
                request = found[1].request
                request.num_draft_tokens, request.num_accepted_tokens = num_drafts, num_accepted
        plain = zip(report.ids, report.token_ids, strict=True)
        updates = [RequestUpdate(found[1].request, token) for name, token in plain if (found := find(name))]
        updates += [_update(found[1].request, news) for news in report.news if (found := find(news.id))]
        for state in self._outputs.apply(updates, now):
            opened = self._open[state.request_id]
            if state.finished:
                self._observer.finished(state)
                del self._open[state.request_id]
            opened.wake()
        for name, failure in report.refused:
            self._refuse(name, failure.error())

    def _refuse(self, name: str, error: ForkpointError) -> None:
        found = self._outputs.find(name)
        if found is not None:  # otherwise the whole request was refused or aborted
            request_id = found[0].request_id
            self._outputs.abort(request_id, time.perf_counter())
            self._observer.refused(error)
            self._open.pop(request_id).wake(error)

    def _end(self, sequences: Sequence[str], reason: FinishReason) -> None:
        if self._died is None:
            self._process.send(messages.EndSequences(tuple(sequences), reason))

    def _on_exit(self, error: ForkpointError) -> None:
        if self._died is None:
            self._end_all(error)
            self._ended.set()

    def _end_all(self, error: ForkpointError) -> None:
        self._died = self._died or error
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(error)
        for request_id, opened in list(self._open.items()):
            opened.wake(error)
            self.abort(request_id)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)


def _update(request: Request, news: messages.SequenceNews) -> RequestUpdate:
    """Update this side's copy of the request, and return the news in the scheduler's form."""
    if news.cache is not None:
        request.cache = news.cache
    request.kv_transfer_params = news.kv_transfer_params
    request.first_scheduled_s, request.num_preemptions = news.first_scheduled_s, news.num_preemptions
    values = news.token_id, news.logprobs, news.prompt_logprobs, news.finish_reason, news.stop_token_id
    error = news.failure.error() if news.failure is not None else None
    return RequestUpdate(request, *values, error)
