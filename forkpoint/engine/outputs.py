"""Turns updates of sequences into what the caller sees: texts, log-probabilities, timings and cache reports."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from forkpoint.engine.detokenize import Detokenizer, StopStrings
from forkpoint.engine.inputs import Prompt
from forkpoint.engine.thinking import ContentFinder
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import ForkpointError
from forkpoint.obs.logs import LOGGER
from forkpoint.outputs import CacheReport, CompletionOutput, Logprob, RequestOutput, RequestTimings
from forkpoint.params import FinishReason, RequestOutputKind
from forkpoint.sched.plan import TokenLogprobs
from forkpoint.sched.request import Request, RequestUpdate


class Observer(Protocol):
    """Receives events for metrics. Times are in seconds."""

    def step(self, num_tokens: int) -> None: ...

    def first_token(self, prompt: Prompt, cache: CacheReport, elapsed_s: float) -> None: ...

    def next_tokens(self, elapsed_s: Sequence[float]) -> None: ...

    def finished(self, state: RequestState) -> None: ...

    def refused(self, error: ForkpointError) -> None: ...


class Completion:
    """One sequence whose CompletionOutput is built token by token. It is read whole or in deltas."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None, stops: StopStrings) -> None:
        params = request.params
        self.request = request
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            skip = params.skip_special_tokens
            self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, skip_special_tokens=skip)
        self._stops = stops
        self._content = ContentFinder(params.thinking)
        self._content_start: int | None = None  # where the search for stop strings begins; None while that is unknown
        self._num_searched = 0  # characters in which no valid stop string ends
        self._text = ""
        self._token_ids: list[int] = []
        self._token_starts: list[int] = []  # for each token the position in the text at which its own text begins
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._stop_reason: str | int | None = None
        self.error: str | None = None
        self._reported_text = 0
        self._reported_tokens = 0
        self._reported_end = False

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def token_starts(self, first: int, count: int) -> list[int]:
        """Return for `count` tokens from `first` on the positions in the completion's text at which their texts begin.

        See `tokens_in`.
        """
        return self._token_starts[first : first + count]

    def tokens_in(self, positions: range) -> range:
        """Return the numbers of the tokens whose text begins at one of these positions of the completion's text.

        The tokens of a character all begin where it is, and a token without a text where the next one's is.
        """
        starts = self._token_starts
        return range(bisect_left(starts, positions.start), bisect_left(starts, positions.stop))

    def logprobs_in(self, positions: range) -> list[dict[int, Logprob]]:
        """Return the log-probabilities of `tokens_in(positions)`; [] if the request does not ask for them."""
        found = self.tokens_in(positions)
        return self._logprobs[found.start : found.stop]

    def apply(self, update: RequestUpdate, now_s: float) -> bool:
        """Apply one update, received at `now_s`.

        Returns True if the completion ended here, by a stop string, which the scheduler does not know yet.
        """
        params, token_id = self.request.params, update.token_id
        if token_id is not None:
            if self.first_token_s is None:
                self.first_token_s = now_s
            self.last_token_s = now_s
            self._token_ids.append(token_id)
            self._token_starts.append(len(self._text))
            if update.logprobs is not None:
                self._cumulative += update.logprobs.logprob
                self._logprobs.append(logprob_dict(update.logprobs, self._tokenizer))
            shown = update.stop_token_id is None or params.include_stop_str_in_output
            if self._detokenizer is not None and shown:
                text = self._detokenizer.add(token_id)
                if params.stop:
                    self._extend(text)
                else:
                    self._text += text
        if self.finish_reason is None and update.finish_reason is not None:
            self._finish(update)
        return self.finish_reason is not None and update.finish_reason is None

    def abort(self) -> None:
        if self.finish_reason is None:
            self._extend(self._flushed(), is_last=True)
            self.finish_reason = FinishReason.ABORT

    def fail(self, error: Exception) -> None:
        """End the completion, because converting its newest token raised `error`. Earlier tokens stay in the output."""
        LOGGER.error("the output of request %s could not be converted to text", self.request.id, exc_info=error)
        self.finish_reason = FinishReason.ERROR
        if self._wants_logprobs:
            del self._token_ids[len(self._logprobs) :]
        self.error = f"RequestFailedError: the output could not be converted to text: {type(error).__name__}: {error}"

    def take_delta(self) -> CompletionOutput | None:
        """Return the news since the last call (text, tokens, the end); None if there are none.

        `output` still has everything.
        """
        text, tokens, ended = self._num_certain, len(self._token_ids), self.finish_reason is not None
        if text <= self._reported_text and tokens == self._reported_tokens and ended == self._reported_end:
            return None
        delta = self._output(self._reported_text, text, self._reported_tokens)
        self._reported_text, self._reported_tokens, self._reported_end = max(text, self._reported_text), tokens, ended
        return delta

    def output(self) -> CompletionOutput:
        return self._output(0, self._num_certain, 0)

    def _output(self, start: int, end: int, token: int) -> CompletionOutput:
        """Return an output with characters `[start, end)` of the text, and the tokens from `token` on."""
        wanted = self._wants_logprobs
        return CompletionOutput(
            index=self._index,
            text=self._text[start:end],
            token_ids=self._token_ids[token:],
            cumulative_logprob=self._cumulative if wanted else None,
            logprobs=self._logprobs[token:] if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self.error,
        )

    @property
    def _wants_logprobs(self) -> bool:
        return self.request.params.logprobs is not None

    @property
    def _num_certain(self) -> int:
        """The number of characters that no stop string can remove."""
        if self.finish_reason is not None or not self.request.params.stop:
            return len(self._text)
        if self._content_start is not None:
            return len(self._text) - self._stops.num_undecided(self._text)
        return len(self._text) if self._content.is_thinking else 0

    def _extend(self, text: str, *, is_last: bool = False) -> None:
        """Append text, and look for a stop string in the content once there are `min_tokens`."""
        self._text += text
        params = self.request.params
        if not params.stop:
            return
        if self._content_start is None:
            self._content_start = self._content.find(self._text, is_whole=is_last)
            if self._content_start is None:
                return
            self._stops.skip(self._content_start)
            self._num_searched = self._content_start
        num_new, self._num_searched = len(self._text) - self._num_searched, len(self._text)
        if len(self._token_ids) < params.min_tokens:
            return
        hit = self._stops.find(self._text, num_new)
        if hit is not None:
            self._stop_reason, length = hit
            self._text = self._text[:length]
            self.finish_reason = FinishReason.STOP

    def _finish(self, update: RequestUpdate) -> None:
        self._extend(self._flushed(), is_last=True)
        if self.finish_reason is not None:
            return
        self.finish_reason = update.finish_reason
        if update.stop_token_id in self.request.params.stop_token_ids:
            self._stop_reason = update.stop_token_id
        if update.error is not None:
            self.error = f"{type(update.error).__name__}: {update.error}"

    def _flushed(self) -> str:
        return self._detokenizer.flush() if self._detokenizer is not None else ""


@dataclass(slots=True, eq=False)
class RequestState:
    """The completions of one prompt, and their common state."""

    request_id: str
    prompt: Prompt
    completions: list[Completion]
    arrival_s: float
    prompt_logprobs: dict[int, dict[int, Logprob]] = field(default_factory=dict)
    finished_s: float | None = None
    _prompt_ids: list[int] | None = None

    def prepare(self) -> list[int]:
        """Return the list of the prompt's ids, which all outputs share. The first call takes a while for a long one."""
        if self._prompt_ids is None:
            self._prompt_ids = self.prompt.token_ids.tolist()
        return self._prompt_ids

    @property
    def has_begun(self) -> bool:
        """Whether some completion has an output token or has ended."""
        return any(c.num_tokens or c.finish_reason is not None for c in self.completions)

    @property
    def finished(self) -> bool:
        return self.finished_s is not None

    @property
    def cache(self) -> CacheReport:
        """The cache report of the first completion."""
        return self.completions[0].request.cache

    @property
    def num_draft_tokens(self) -> int:
        return sum(completion.request.num_draft_tokens for completion in self.completions)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(completion.request.num_accepted_tokens for completion in self.completions)

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The engine's offer of the prompt to the engine that continues it, or None."""
        return self.completions[0].request.kv_transfer_params

    @property
    def metrics(self) -> RequestTimings:
        scheduled = [c.request.first_scheduled_s for c in self.completions if c.request.first_scheduled_s is not None]
        tokens = [c.first_token_s for c in self.completions if c.first_token_s is not None]
        return RequestTimings(
            arrival_s=self.arrival_s,
            first_scheduled_s=min(scheduled, default=None),
            first_token_s=min(tokens, default=None),
            finished_s=self.finished_s,
        )

    def output(self) -> RequestOutput:
        """Return the output so far, or only what is new if the request asks for that."""
        read: Callable[[Completion], CompletionOutput | None] = Completion.output
        if self.completions[0].request.params.output_kind is RequestOutputKind.DELTA:
            read = Completion.take_delta
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prepare(),
            outputs=[*filter(None, map(read, self.completions))],
            finished=self.finished,
            cache=self.cache,
            metrics=self.metrics,
            prompt_logprobs=self.all_prompt_logprobs(),
            num_preemptions=sum(c.request.num_preemptions for c in self.completions),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            kv_transfer_params=self.kv_transfer_params,
        )

    def all_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return one entry for each prompt token; None if they were not requested.

        The first token's entry is None, and so are entries that have not come yet.
        """
        if self.completions[0].request.params.prompt_logprobs is None:
            return None
        return [self.prompt_logprobs.get(position) for position in range(len(self.prompt.token_ids))]


class OutputAssembler:
    """Holds the open requests and turns updates of their sequences into outputs.

    `end` is called with the ids of sequences that end here first, and the reason, so that the engine stops them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        end: Callable[[Sequence[str], FinishReason], None],
        observer: Observer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._end = end
        self._observer = observer
        self._states: dict[str, RequestState] = {}
        self._by_sequence: dict[str, tuple[RequestState, Completion]] = {}

    def add(self, prompt: Prompt, requests: Sequence[Request]) -> RequestState:
        """Add the sequences of one prompt, and return their state. The first one's id is the request's."""
        first = requests[0]
        stops = StopStrings(first.params.stop, include=first.params.include_stop_str_in_output)
        tokenizer = self._tokenizer if first.params.detokenize else None
        completions = [Completion(each, index, tokenizer, copy(stops)) for index, each in enumerate(requests)]
        state = RequestState(first.id, prompt, completions, first.arrival_s)
        self._states[state.request_id] = state
        for completion in completions:
            self._by_sequence[completion.request.id] = (state, completion)
        return state

    @property
    def num_sequences(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._by_sequence)

    def find(self, name: str) -> tuple[RequestState, Completion] | None:
        """Return the sequence with this id and its request; None if it has ended."""
        return self._by_sequence.get(name)

    def apply(self, updates: Sequence[RequestUpdate], now_s: float) -> list[RequestState]:
        """Apply updates that came at `now_s`, and return the requests with news.

        A sequence ends here if it has a stop string, or if its tokens cannot be converted; then `end` is called.
        Updates of sequences that have ended are ignored.
        """
        stopped: list[str] = []
        changed: dict[str, RequestState] = {}
        elapsed_s: list[float] = []  # times since the previous token, for all tokens but first ones
        for update in updates:
            entry = self._by_sequence.get(update.request.id)
            if entry is None:
                continue  # a stop string or an abort ended it after this step was issued
            state, completion = entry
            changed[state.request_id] = state
            if self._observer is not None and update.token_id is not None:
                if completion.last_token_s is None:
                    self._observer.first_token(state.prompt, completion.request.cache, now_s - state.arrival_s)
                else:
                    elapsed_s.append(now_s - completion.last_token_s)
            try:
                for position, logprobs in update.prompt_logprobs:
                    state.prompt_logprobs[position] = logprob_dict(logprobs, self._tokenizer)
                ended_here = completion.apply(update, now_s)
            except Exception as error:  # any error ends only this completion
                completion.fail(error)
                ended_here = update.finish_reason is None
            if ended_here:
                stopped.append(update.request.id)
            if completion.finish_reason is not None:
                del self._by_sequence[update.request.id]
                self._close_if_ended(state, now_s)
        if self._observer is not None and elapsed_s:
            self._observer.next_tokens(elapsed_s)
        if stopped:
            self._end(stopped, FinishReason.STOP)
        return list(changed.values())

    def abort(self, request_id: str, now_s: float) -> RequestState | None:
        """End a request and return it with the output so far; None if it is not open. Calls `end`."""
        state = self._states.get(request_id)
        if state is None:
            return None
        sequences = [c.request.id for c in state.completions if c.finish_reason is None]
        for completion in state.completions:
            completion.abort()
            self._by_sequence.pop(completion.request.id, None)
        self._close_if_ended(state, now_s)
        self._end(sequences, FinishReason.ABORT)
        return state

    def _close_if_ended(self, state: RequestState, now_s: float) -> None:
        if all(c.finish_reason is not None for c in state.completions):
            state.finished_s = now_s
            del self._states[state.request_id]


def logprob_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return log-probabilities by token id: the chosen token first, then the likeliest ones."""
    found = {entry.token_id: _logprob(entry.token_id, entry.logprob, entry.rank, tokenizer)}
    for rank, (token, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        found.setdefault(token, _logprob(token, value, rank, tokenizer))
    return found


def _logprob(token_id: int, value: float, rank: int, tokenizer: Tokenizer | None) -> Logprob:
    if tokenizer is None:
        return Logprob(value, rank)
    data = tokenizer.token_bytes(token_id)  # decoding one token may drop a space at its start
    return Logprob(value, rank, data.decode(errors="replace"), data)
