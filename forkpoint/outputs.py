"""The outputs of requests, as callers get them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from forkpoint.params import FinishReason


@enum.unique
class MissReason(enum.StrEnum):
    """Why the tokens after the cached prefix were not reused."""

    COLD = "cold"  # never seen under this salt, or too long ago to remember
    SHORT = "short"  # no block ends before the prompt's last token
    NO_CHECKPOINT = "no_checkpoint"  # keys and values reach further, but no checkpoint was kept there
    EVICTED = "evicted"  # it was cached and then evicted for a more valuable entry
    BYPASSED = "bypassed"  # the request (such as prompt_logprobs) or the configuration forbids cache reads


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the prefix cache did for one request.

    `num_cached_tokens` of `num_prompt_tokens` prompt tokens were reused. Keys and values alone reached
    `kv_num_tokens`. `miss` says why less than the reusable prompt was reused; None means that all of it was.
    `num_restored_tokens` of the reused tokens were copied from the host tier, the disk tier or another engine, and
    `num_peer_tokens` of them from another engine.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    kv_num_tokens: int = 0
    miss: MissReason | None = None
    num_restored_tokens: int = 0
    num_peer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token, its rank (1 is the most likely), its text and its bytes.

    A token may be a part of a character. Its text then has U+FFFD, and its bytes say which part it is.
    """

    logprob: float
    rank: int
    decoded_token: str = ""
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Clock readings in seconds (time.perf_counter). None until the event has happened."""

    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    # vLLM's names
    queued_ts = property(attrgetter("arrival_s"))
    scheduled_ts = property(attrgetter("first_scheduled_s"))
    first_token_ts = property(attrgetter("first_token_s"))
    last_token_ts = property(attrgetter("finished_s"))
    first_token_latency = property(attrgetter("time_to_first_token_s"))


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request, whole or the news of it. It belongs to the caller, lists included.

    `stop_reason` is the stop string or token id that ended it; None if nothing of the caller's did. `error` is set if
    it failed. Log-probabilities are None unless they were requested.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request so far. `finished`: nothing more will come. Log-probabilities may be None.

    It belongs to the caller, lists included. What all outputs of a request share is to be left as it is: the list
    `prompt_token_ids`, which may be long, and the dicts of log-probabilities.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    cache: CacheReport = field(default_factory=CacheReport)
    metrics: RequestTimings = field(default_factory=RequestTimings)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # of all completions
    num_accepted_tokens: int = 0  # of those
    kv_transfer_params: Mapping[str, Any] | None = None  # for the engine that continues this prompt

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens of the first completion that the model did not compute."""
        return self.cache.num_cached_tokens
