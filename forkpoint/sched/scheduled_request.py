"""A request inside the scheduler: where it is, what it holds, what is in flight."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.cache.lease import Lease
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.tree import Checkpoint, Node
from forkpoint.outputs import CacheReport
from forkpoint.sched.plan import NO_ROW, IntArray, StepPlan
from forkpoint.sched.request import Request


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Written by the Scheduler and its parts: admission, running set.

    The lease counts its planned and its confirmed tokens. Tokens `[0, prefill_end)` go through the prefill kernels, the
    others through the decode kernels. Tokens from `num_tokens_at_admission` on were sampled in this run.
    `num_to_compute` tokens are ever computed: all but the last output. A row that `waits_for_output` is planned only
    once its last output is known, or early if the DraftPlanner allows it.
    """

    request: Request
    lease: Lease
    order: tuple[int, int]  # (priority, arrival number): smaller runs first, larger is preempted first
    row: int = NO_ROW
    prefill_end: int = 0
    num_tokens_at_admission: int = 0
    num_to_compute: int = 0
    waits_for_output: bool = False
    last_step: int = -1  # the last step that carries this row
    leaving: bool = False  # it is planned no more, and keeps its row while a step that carries it is in flight
    ended: bool = False  # its request has; else it leaves in order to run again
    junctions: frozenset[int] = frozenset()
    expected: Checkpoint | None = None  # where this waiting request is known to resume
    suspect_until: int = 0  # tokens that it had come to in a step that failed; so far it is to be tried alone

    def __post_init__(self) -> None:
        self.num_to_compute = self.request.num_prompt_tokens + self.request.max_tokens - 1

    def tokens_beyond_chain(self, end: int) -> IntArray:
        """The known tokens up to position `end` that the lease's hash chain does not have yet."""
        return self.request.token_ids(self.lease.chain.num_tokens, end)

    def record_hit(self, hit: PrefixHit, gained: int | None = None) -> None:
        """Report a hit on the request; `gained`: tokens that a run under way did not have to compute."""
        request = self.request
        first_run = request.num_preemptions == 0
        before = (request.cache if first_run else request.resume_cache) or CacheReport()
        cached = hit.num_tokens if gained is None else before.num_cached_tokens + gained
        report = CacheReport(self.num_tokens_at_admission, cached, hit.kv_num_tokens, hit.miss)
        if first_run:
            request.cache = report
        else:
            request.resume_cache = report


@dataclass(slots=True, eq=False)
class IssuedStep:
    """What has to be settled when a step's result arrives, or undone when it fails. `requests` are those of the plan's
    rows, `sampled` those of which it samples, `filed` is what it and the plans before it computed of what was filed
    since."""

    plan: StepPlan
    requests: list[ScheduledRequest]
    sampled: list[ScheduledRequest]
    readers: list[Checkpoint]
    filed: list[Node | Checkpoint]
    started_s: float = 0.0  # when its planning had ended, where somebody drafts
