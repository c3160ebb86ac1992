"""What the simulator drives: the engine's scheduler, or an emulation of another engine's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from forkpoint.outputs import CacheReport
from forkpoint.sim.cost import StepLoad
from forkpoint.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class StepNews:
    """What a finished step tells: requests whose prompts it finished (again, where they had been preempted), and so
    sampled a first token of, and of requests that ended with it what the cache did for them."""

    first_tokens: tuple[str, ...]
    finished: dict[str, CacheReport]


@dataclass(slots=True)
class SystemCounters:
    """Counted since the start. Bytes written are those of computed keys and values and of stored states."""

    kv_written_bytes: int = 0
    state_written_bytes: int = 0
    states_evicted: int = 0
    blocks_evicted: int = 0
    num_preemptions: int = 0
    lost_tokens: dict[str, int] = field(default_factory=dict)


class ServedSystem(Protocol):
    """One replica. `plan` and `finish` take turns; times are the simulator's."""

    def add(self, request: TraceRequest) -> bool:
        """Queue a request; False if even an empty cache could not hold it."""

    def restorable(self, request: TraceRequest) -> int:
        """Tokens of the prompt that a request added now would not have to compute."""

    def num_unfinished(self) -> int:
        """Requests that are queued or run."""

    def plan(self, now_s: float) -> StepLoad | None:
        """Plan and issue the next step; None if there is nothing to do."""

    def finish(self, now_s: float) -> StepNews:
        """The step planned last has ended."""

    def counters(self) -> SystemCounters:
        """What was counted so far."""
