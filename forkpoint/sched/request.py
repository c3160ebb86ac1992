"""One sequence to generate, and what the scheduler reports about it. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from forkpoint.errors import StructuredOutputError
from forkpoint.images import ImageSpan
from forkpoint.outputs import CacheReport
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.sched.plan import IntArray, TokenLogprobs

MOST_IN_FLIGHT: Final = 64  # the most outputs, drafts included, that are in flight when a step is planned


class Grammar(Protocol):
    """The rules for the outputs of one request. It has followed exactly the outputs that the request has."""

    @property
    def mask(self) -> IntArray | None:
        """The ids that may come next, as bits like in TokenMasks; None: the output is whole, and nothing may come."""

    @property
    def is_free(self) -> bool:
        """Whether the next MOST_IN_FLIGHT outputs may be sampled without masks, before earlier ones are known."""

    def accept(self, token_id: int) -> None:
        """Follow one more output, after which `mask` and `is_free` change. Not called once the mask is None.

        Raises StructuredOutputError if the output is not allowed, or nothing may come after it.
        """

    def copy(self) -> Grammar:
        """Return a copy that follows outputs of its own."""


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: `n` completions of one prompt are `n` requests. Only the scheduler writes it.

    It ends with `max_tokens` outputs, or with one of `stop_token_ids` once `min_tokens` are out; the end-of-sequence
    ids are among them unless `ignore_eos` is set. `breakpoints` are in tokens. An answer with one
    of `tool_call_token_ids` contains a tool call. Requests of a smaller `priority` run first. A request with a
    `grammar` that is not free samples only once its earlier outputs are known.
    """

    id: str
    prompt_token_ids: IntArray
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    breakpoints: tuple[int, ...] = ()
    priority: int = 0
    arrival_s: float = 0.0
    grammar: Grammar | None = None
    tool_call_token_ids: frozenset[int] = frozenset()
    images: tuple[ImageSpan, ...] = ()  # images of the prompt, in its order

    output_token_ids: list[int] = field(default_factory=list)
    cache: CacheReport = field(default_factory=CacheReport)
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # accepted draft tokens
    resume_cache: CacheReport | None = None  # the latest run after a preemption; outputs count as its prompt
    prompt_logprobs_done: bool = False
    kv_transfer_params: Mapping[str, Any] | None = None  # fields of the answer: what this engine offers of the prompt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and not self.prompt_logprobs_done

    @property
    def reads_cache(self) -> bool:
        """Whether cached prefixes may serve its prompt."""
        return not (self.wants_prompt_logprobs or self.params.skip_reading_prefix_cache)

    @property
    def is_constrained(self) -> bool:
        """Whether its next output needs the mask of its grammar."""
        return self.grammar is not None and not self.grammar.is_free

    @property
    def awaits_tool(self) -> bool:
        """Whether the outputs so far contain one of `tool_call_token_ids`, the start of a tool call."""
        return bool(self.tool_call_token_ids) and not self.tool_call_token_ids.isdisjoint(self.output_token_ids)

    def all_token_ids(self) -> IntArray:
        return self.token_ids(0, self.num_tokens)

    def token_ids(self, start: int, end: int) -> IntArray:
        """Return the tokens `[start, end)`, prompt and outputs, as far as there are any."""
        prompt, num_prompt = self.prompt_token_ids, self.num_prompt_tokens
        if end <= num_prompt:
            return prompt[start:end]
        outputs = np.asarray(self.output_token_ids[max(start - num_prompt, 0) : end - num_prompt], np.int32)
        if start >= num_prompt:
            return outputs
        return np.concatenate([prompt[start:], outputs])


class RequestEnding(NamedTuple):
    """Why a request ends with its newest output: the reason, and the stop token or the error."""

    reason: FinishReason
    stop_token_id: int | None = None
    error: Exception | None = None


def follow(request: Request, token_id: int) -> RequestEnding | None:
    """Let the request's grammar follow `token_id`, its newest output.

    Returns how the request ends with it (a stop token, an error, a whole output or `max_tokens`); None if it goes on.
    """
    num_outputs = len(request.output_token_ids)
    if token_id in request.stop_token_ids and num_outputs > request.params.min_tokens:
        return RequestEnding(FinishReason.STOP, token_id)
    if request.grammar is not None:
        try:
            request.grammar.accept(token_id)
        except StructuredOutputError as error:
            return RequestEnding(FinishReason.ERROR, error=error)
        if request.grammar.mask is None:
            return RequestEnding(FinishReason.STOP)
    return RequestEnding(FinishReason.LENGTH) if num_outputs >= request.max_tokens else None


class RequestUpdate(NamedTuple):
    """A report on one request from one step: at most one new token, and the end if it came."""

    request: Request
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: Exception | None = None
