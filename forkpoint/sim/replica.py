"""The interface of a simulated replica: the engine's scheduler, or an emulation of another engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from forkpoint.outputs import CacheReport
from forkpoint.sim.cost import StepLoad
from forkpoint.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class StepNews:
    """The news of a finished step.

    `first_tokens` are requests whose prompts it finished (again, after a preemption), `finished` the cache reports of
    requests that ended.
    """

    first_tokens: tuple[str, ...]
    finished: dict[str, CacheReport]


@dataclass(slots=True)
class ReplicaCounters:
    """Counters since the start. Bytes written count computed keys and values and stored states."""

    kv_written_bytes: int = 0
    state_written_bytes: int = 0
    states_evicted: int = 0
    blocks_evicted: int = 0
    num_preemptions: int = 0
    restored_tokens: int = 0  # the reused tokens that came from the host tier
    read_tokens: int = 0  # the reused tokens that came from the disk tier
    lost_tokens: dict[str, int] = field(default_factory=dict)


class SimulatedReplica(Protocol):
    """One replica. `plan` and `finish` alternate. Times are simulated."""

    def add(self, request: TraceRequest) -> bool:
        """Queue a request. Return False if even an empty cache could not hold it."""

    def restorable(self, request: TraceRequest) -> int:
        """Return how many prompt tokens a request added now would not have to compute."""

    def num_unfinished(self) -> int:
        """Return the number of queued and running requests."""

    def plan(self, now_s: float) -> StepLoad | None:
        """Plan and issue the next step, and return its work; None if there is nothing to do."""

    def finish(self, now_s: float) -> StepNews:
        """Finish the last planned step at `now_s`, and return its news."""

    def counters(self) -> ReplicaCounters:
        """Return the counters so far."""
