"""A request inside the scheduler: where it is, what it holds, what is in flight."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from forkpoint.cache.lease import Lease
from forkpoint.cache.tree import Checkpoint, Node
from forkpoint.sched.request import Request

NO_ROW = -1


@enum.unique
class Leaving(enum.Enum):
    """Why an entry is on its way out of the batch while a step that carries it is still in flight."""

    FINISHED = "finished"
    PREEMPTED = "preempted"


@dataclass(slots=True, eq=False)
class Entry:
    """Written by the Scheduler alone.

    Tokens `[0, num_computed)` are computed by the plans issued so far. `[0, prefill_end)` go through the
    prefill kernels; `num_known` tokens were known when the row was added, later ones were sampled by this run.
    """

    request: Request
    lease: Lease
    order: tuple[int, int]  # (priority, arrival number): smaller runs first, larger is preempted first
    row: int = NO_ROW
    num_computed: int = 0
    prefill_end: int = 0
    num_known: int = 0
    num_issued: int = 0  # issued plans, not yet answered, that carry this row
    num_sampling: int = 0  # of those, plans that sample a token
    planned_step: int = -1
    leaving: Leaving | None = None
    junctions: frozenset[int] = frozenset()
    expected: Checkpoint | None = None  # where this waiting request is known to resume


@dataclass(slots=True, eq=False)
class IssuedStep:
    """What has to be settled when a step's result arrives, or undone when it fails."""

    step: int
    entries: list[Entry]
    sampled: list[Entry]
    readers: list[Checkpoint] = field(default_factory=list)
    made: list[Node | Checkpoint] = field(default_factory=list)
