"""What the API process and the engine process say to each other. Token ids only; texts stay with the API.

Commands go to the engine, reports come back; both travel as msgpack arrays. A sequence is named by the integer
`key` that the API process gave it.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from forkpoint import errors
from forkpoint.errors import EngineStoppedError, ForkpointError
from forkpoint.outputs import CacheReport
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.sched.plan import TokenLogprobs
from forkpoint.sched.request import Request

MAX_ERROR_LENGTH = 1000  # characters; some libraries print whole tensors into their messages


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all messages."""


class AddSequence(Message, frozen=True):
    """A sequence to generate; `token_ids` are the prompt's, int32, little endian."""

    key: int
    id: str
    token_ids: bytes
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    breakpoints: tuple[int, ...]
    priority: int
    arrival_s: float
    tool_call_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, key: int, request: Request) -> AddSequence:
        return cls(
            key=key,
            id=request.id,
            token_ids=request.prompt_token_ids.astype("<i4", copy=False).tobytes(),
            params=request.params,
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop_token_ids=tuple(request.stop_token_ids),
            breakpoints=request.breakpoints,
            priority=request.priority,
            arrival_s=request.arrival_s,
            tool_call_token_ids=tuple(request.tool_call_token_ids),
        )

    def request(self) -> Request:
        return Request(
            id=self.id,
            prompt_token_ids=np.frombuffer(self.token_ids, "<i4").astype(np.int32, copy=False),
            params=self.params,
            max_tokens=self.max_tokens,
            seed=self.seed,
            stop_token_ids=frozenset(self.stop_token_ids),
            breakpoints=self.breakpoints,
            priority=self.priority,
            arrival_s=self.arrival_s,
            tool_call_token_ids=frozenset(self.tool_call_token_ids),
        )


class EndSequences(Message, frozen=True):
    """The API process wants no more of these: a stop string ended them (`stopped`), or the caller left."""

    keys: tuple[int, ...]
    stopped: bool = False


class Call(Message, frozen=True):
    """A question that is answered between two steps, by a Reply with the same number."""

    number: int
    name: Literal["stats", "reset_prefix_cache", "check_integrity"]


class Stop(Message, frozen=True):
    """End the process; what is still running is dropped."""


Command: TypeAlias = AddSequence | EndSequences | Call | Stop


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error on its way to the other process: the name of its class in `errors`, and its message."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = str(error)
        shown = text if len(text) <= MAX_ERROR_LENGTH else text[:MAX_ERROR_LENGTH] + "..."
        if isinstance(error, ForkpointError):
            return cls(type(error).__name__, shown)
        return cls(EngineStoppedError.__name__, f"{type(error).__name__}: {shown}")

    def error(self) -> ForkpointError:
        kind = getattr(errors, self.kind, EngineStoppedError)
        assert issubclass(kind, ForkpointError)
        return kind(self.text)


class Ready(Message, frozen=True):
    """The model is loaded; `stats` are the first reading of counters and gauges."""

    vocab_size: int
    max_model_len: int
    stats: dict[str, Any]


class SequenceNews(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """News of one sequence from one step that are more than a token."""

    key: int
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cache: CacheReport | None = None
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    failure: Failure | None = None


class StepReport(Message, frozen=True):
    """One step: `keys[i]` got `token_ids[i]` and nothing else happened to it; `news` has all others.

    `num_tokens` entered the model. `refused` sequences were not accepted.
    """

    keys: list[int]
    token_ids: list[int]
    news: list[SequenceNews]
    refused: list[tuple[int, Failure]]
    num_tokens: int = 0


class Reply(Message, frozen=True):
    """The answer to a Call; `failure` says why there is no `value`."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Died(Message, frozen=True):
    """The engine process ends with an error, while loading or later."""

    failure: Failure


Report: TypeAlias = Ready | StepReport | Reply | Died
