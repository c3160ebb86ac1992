"""A request inside the scheduler: its place and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from forkpoint.cache.lease import NOT_DECODED, Lease
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.tree import Checkpoint
from forkpoint.config import BLOCK_SIZE
from forkpoint.outputs import CacheReport
from forkpoint.sched.plan import NO_ROW, NO_SLOT, IntArray, StateFlush
from forkpoint.sched.request import Request


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A waiting or running request. Written by the Scheduler and its parts: Admission, RunningSet, Retries.

    The lease counts its planned and its confirmed tokens. Tokens `[0, prefill_end)` go through the prefill kernels, the
    others through the decode kernels. Tokens from `num_tokens_at_admission` on were sampled in this run. Only
    `num_to_compute` tokens are ever computed: all but the last output. A row that `waits_for_output`, or
    whose request is constrained, is planned once its last output is known, or early if the DraftPlanner allows it.
    """

    request: Request
    lease: Lease
    order: tuple[int, int]  # (priority, arrival number): the smaller runs first, the larger is preempted first
    row: int = NO_ROW
    prefill_end: int = 0
    num_tokens_at_admission: int = 0
    num_to_compute: int = 0
    waits_for_output: bool = False
    last_step: int = -1  # the newest step that has this row
    leaving: bool = False  # no longer planned; it keeps its row while a step with that row is in flight
    ended: bool = False  # its request has ended; otherwise it leaves in order to run again
    junctions: frozenset[int] = frozenset()
    expected: Checkpoint | None = None  # the checkpoint that this waiting request would resume from
    restores: bool = True  # whether a longer prefix is to be copied from a tier
    num_restored_tokens: int = 0  # tokens of this run's prefix that were copied from a tier or a peer
    restored_from: str = ""  # the name of their RestoreSource
    suspect_until: int = 0  # tokens; up to there Retries plans it alone

    def __post_init__(self) -> None:
        self.num_to_compute = self.request.num_prompt_tokens + self.request.max_tokens - 1

    def tokens_beyond_chain(self, end: int) -> IntArray:
        """Return the tokens up to position `end` that the lease's hash chain does not have yet."""
        return self.request.token_ids(self.lease.chain.num_tokens, end)

    def last_flush(self, interval: int, slot: int) -> StateFlush | None:
        """Return what completes the state in `slot` once the row leaves, if the state may become a checkpoint.

        States are written every `interval` tokens.
        """
        lease = self.lease
        lags = lease.first_decode != NOT_DECODED and (interval > 1 or lease.num_pending)
        if not lags or lease.detached or slot == NO_SLOT or lease.num_planned % BLOCK_SIZE:
            return None
        written = end = lease.num_planned
        if interval > 1:
            counts = (lease.first_decode, end, lease.num_pending)
            first, start, pending = (np.full(1, value, np.int32) for value in counts)
            written = int(num_written(first, start, pending, interval)[0])
        return StateFlush(self.row, slot, end, written, lease.num_pending)

    def record_hit(self, hit: PrefixHit, gained: int | None = None) -> None:
        """Put a report of this hit on the request: `request.cache`, or `request.resume_cache` after a preemption.

        If a request in prefill has jumped to a longer prefix, `gained` is the number of tokens that the jump spared.
        They are added to those of the report before.
        """
        request = self.request
        first_run = request.num_preemptions == 0
        before = (request.cache if first_run else request.resume_cache) or CacheReport()
        num_cached = hit.num_tokens
        if gained is not None:
            num_cached = before.num_cached_tokens + gained
        num_restored = min(self.num_restored_tokens, num_cached)
        report = CacheReport(self.num_tokens_at_admission, num_cached, hit.kv_num_tokens, hit.miss, num_restored)
        if self.restored_from == "peer":
            report = replace(report, num_peer_tokens=num_restored)
        if first_run:
            request.cache = report
        else:
            request.resume_cache = report


def num_written(first_decode: IntArray, start: IntArray, pending: IntArray, interval: int) -> IntArray:
    """Return how many tokens the states in the rows' slots have at `start`, if written at multiples of `interval`.

    A row's last step wrote its state at the last multiple that the step's start had reached. At its first decode step,
    and before it, the state has all tokens. The results of all steps but the last one must be known.
    """
    last_start = start - np.maximum(pending, 1)
    written = np.maximum(first_decode, last_start // interval * interval)
    return np.where(first_decode == NOT_DECODED, start, written)
