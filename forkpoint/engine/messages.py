"""Messages between the API process and the engine process. They contain only token ids; texts stay in the API process.

Commands go to the engine, and reports come back. Both are encoded as msgpack arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from forkpoint.outputs import CacheReport
from forkpoint.params import FinishReason
from forkpoint.sched.plan import TokenLogprobs
from forkpoint.sched.request import Request
from forkpoint.worker.codec import Failure


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all messages."""


class AddSequence(Message, frozen=True):
    """A sequence to generate. The API process chooses its id, which no other sequence ever has."""

    request: Request


class EndSequences(Message, frozen=True):
    """Ends sequences that are no longer wanted: a stop string ended them, or the caller left."""

    ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT


class EndOffer(Message, frozen=True):
    """Ends the offer of a refused request, under a lease that a proxy chose, so that no other engine waits for it."""

    lease: int


class Call(Message, frozen=True):
    """A question that is answered between two steps, by a CallReply with the same number."""

    number: int
    name: Literal["stats", "reset_prefix_cache", "check_integrity"]


class Stop(Message, frozen=True):
    """Ends the process. Running sequences are dropped."""


Command: TypeAlias = AddSequence | EndSequences | EndOffer | Call | Stop


class Ready(Message, frozen=True):
    """The model is loaded. `stats` is the first reading of counters and gauges."""

    vocab_size: int
    max_model_len: int
    stats: dict[str, Any]


class ImagesTaken(Message, frozen=True):
    """The engine has opened the pixels of the sequence `id`, so the API process need not keep them for it."""

    id: str


class SequenceNews(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """One sequence's news from one step, if it is more than a token."""

    id: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cache: CacheReport | None = None
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    failure: Failure | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


class StepReport(Message, frozen=True):
    """The result of one step. Sequence `ids[i]` got `token_ids[i]` and nothing else. `news` has all other sequences.

    `num_tokens` is the number of tokens that entered the model. `refused` are sequences that were not accepted.
    `drafts` maps the id of a sequence with news and drafts to (drafts so far, accepted drafts so far). `is_full`:
    another sequence would be refused now.
    """

    ids: list[str]
    token_ids: list[int]
    news: list[SequenceNews]
    refused: list[tuple[str, Failure]]
    num_tokens: int = 0
    drafts: dict[str, tuple[int, int]] = {}
    is_full: bool = False


class CallReply(Message, frozen=True):
    """The answer to a Call. `failure` says why there is no `value`."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Died(Message, frozen=True):
    """The engine process ends with an error, while loading or later."""

    failure: Failure


Report: TypeAlias = Ready | ImagesTaken | StepReport | CallReply | Died
