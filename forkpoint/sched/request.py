"""One sequence to generate, and what the scheduler reports about it. No torch here."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forkpoint.outputs import CacheReport
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.sched.plan import IntArray, TokenLogprobs


@enum.unique
class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: `n` completions of one prompt are `n` requests. Written by the scheduler alone.

    `max_tokens` is the output length at which it ends. `stop_token_ids` end it once `min_tokens` are out (the
    end-of-sequence ids are among them unless `ignore_eos`). `breakpoints` are declared boundaries, in tokens.
    A smaller `priority` runs first.
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

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    cache: CacheReport = field(default_factory=CacheReport)
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    resume_cache: CacheReport | None = None  # of the latest run after a preemption; its "prompt" is all known tokens
    prompt_logprobs_done: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and not self.prompt_logprobs_done

    def all_token_ids(self) -> IntArray:
        return np.concatenate([self.prompt_token_ids, np.asarray(self.output_token_ids, np.int32)])


class RequestUpdate(NamedTuple):
    """News of one request from one step: at most one new token, and the end if it came."""

    request: Request
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: Exception | None = None
