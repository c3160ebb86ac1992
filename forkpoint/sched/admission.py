"""Which waiting requests start in a step, and from which prefix; where prefill chunks end, and what they store."""

from __future__ import annotations

from collections.abc import Callable

from forkpoint.cache.capture import CaptureContext, CapturePolicy
from forkpoint.cache.lookup import NOTHING, PrefixHit
from forkpoint.cache.manager import CacheManager
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.request import Request
from forkpoint.sched.running import RunningSet
from forkpoint.sched.scheduled_request import ScheduledRequest

MIN_GAIN_TO_WAIT = 256  # tokens; a request waits one step for another's state only if that saves as much
MAX_PASSED_OVER = 32  # waiting requests looked at behind one that cannot start in this step


class Admission:
    """Moves requests from the queue to the batch while rows, budget and room last, and cuts prompts into chunks for a
    step's budget."""

    def __init__(
        self,
        cache: CacheManager,
        waiting: WaitingQueue,
        running: RunningSet,
        capture: CapturePolicy,
        interval: int,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._capture = capture
        self._interval = interval
        self._clock = clock
        self._fallback_step = cache.layout.fallback_step(cache.arena.num_pages)

    def admit_waiting(
        self,
        builder: PlanBuilder,
        more_urgent_than: ScheduledRequest | None = None,
        only: ScheduledRequest | None = None,
    ) -> None:
        """Start waiting requests in order; if `more_urgent_than` is given, only those of smaller priority value, and
        if `only` is, no other."""
        passed_over = 0
        for scheduled in list(self._waiting.requests) if only is None else [only]:
            if not self._running.free_rows or builder.budget <= 0 or passed_over > MAX_PASSED_OVER:
                return
            if more_urgent_than is not None and scheduled.order[0] >= more_urgent_than.order[0]:
                return
            usable = self._cache.layout.usable_prefix(scheduled.request.num_tokens)
            if builder.budget < BLOCK_SIZE and not self._may_end(builder, scheduled, usable):
                passed_over += 1
                continue
            soon = self._cache.filing.reusable_soon(scheduled.lease, usable)
            if soon < MIN_GAIN_TO_WAIT and not self._may_fit(builder, scheduled):
                return
            hit = self._cache.lookup(
                scheduled.lease, scheduled.request.num_tokens, not scheduled.request.wants_prompt_logprobs
            )
            if soon - hit.num_tokens >= MIN_GAIN_TO_WAIT:
                passed_over += 1
                continue
            prefill_end = self._prefill_end(scheduled.request)
            start = hit.num_tokens
            if start < prefill_end and self.chunk_end(start, prefill_end, builder.budget) <= start:
                passed_over += 1
                continue
            if not self._admit(builder, scheduled, hit):
                return

    def _may_end(self, builder: PlanBuilder, scheduled: ScheduledRequest, usable: int) -> bool:
        """Return False, without a lookup, if the budget cannot take the request to the end of its prefill.

        For budgets below a block, since a chunk may end off the grid only there. `usable` is the longest possible hit.
        """
        rest = self._prefill_end(scheduled.request) - usable
        return rest <= builder.budget and (rest <= 0 or self._cache.may_hit(scheduled.lease, usable))

    def _may_fit(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> bool:
        """False, without a lookup, if whatever it found the scheduled would have to wait for others to leave."""
        if builder.budget < BLOCK_SIZE or not self._someone_else_has_pages():
            return True
        return self._cache.may_have_room(scheduled.lease, scheduled.request.num_tokens + 1, len(self._running.requests))

    def _admit(self, builder: PlanBuilder, scheduled: ScheduledRequest, hit: PrefixHit) -> bool:
        request, lease = scheduled.request, scheduled.lease
        spare = len(self._running.requests)
        if not self._cache.has_room(hit, request.num_tokens + 1, spare):
            if self._someone_else_has_pages():
                return False
            hit = hit if self._cache.has_room(hit, request.num_tokens, 0) else NOTHING
        self._cache.attach(lease, hit)
        start, prefill_end = hit.num_tokens, self._prefill_end(request)
        end = self.chunk_end(start, prefill_end, builder.budget) if start < prefill_end else start + 1
        if not (self._cache.ensure_slot(lease) and self._cache.ensure_blocks(lease, end)):
            scheduled.lease = self._cache.release(lease)
            if self._someone_else_has_pages() or hit is NOTHING:
                return False
            return self._admit(builder, scheduled, NOTHING)
        self._waiting.remove(scheduled)
        self._start(builder, scheduled, hit, prefill_end)
        if start < prefill_end:
            self.add_chunk(builder, scheduled, start, end)
        else:
            builder.add_decode(scheduled)
        return True

    def _someone_else_has_pages(self) -> bool:
        return bool(self._running.requests or self._running.leaving)

    def _start(self, builder: PlanBuilder, scheduled: ScheduledRequest, hit: PrefixHit, prefill_end: int) -> None:
        request = scheduled.request
        self._cache.expect(scheduled.expected, -1)
        scheduled.expected = None
        self._running.start(scheduled)
        scheduled.prefill_end, scheduled.num_tokens_at_admission = prefill_end, request.num_tokens
        scheduled.waits_for_output = scheduled.waits_for_output or request.grammar is not None
        scheduled.junctions = self._cache.count_query(scheduled.lease, request.num_tokens, hit)
        scheduled.record_hit(hit)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
        builder.add_row(scheduled)

    # --- chunks

    def _prefill_end(self, request: Request) -> int:
        """Tokens that go through the prefill kernels. Outputs of an earlier run do too, except in deterministic mode,
        where they are replayed through the decode kernels."""
        return request.num_prompt_tokens if self._cache.deterministic else request.num_tokens

    def chunk_end(self, start: int, prefill_end: int, budget: int) -> int:
        """Where a chunk from `start` ends: at the end of the prompt, else on the grid."""
        end = min(prefill_end, start + budget)
        return end if end == prefill_end else end // BLOCK_SIZE * BLOCK_SIZE

    def add_chunk(self, builder: PlanBuilder, scheduled: ScheduledRequest, start: int, end: int) -> None:
        """Plan the chunk `[start, end)` of a running scheduled, for which there are blocks, and what it saves."""
        request, lease = scheduled.request, scheduled.lease
        context = CaptureContext(
            start=start,
            end=end,
            prompt_end=scheduled.prefill_end,
            grid=BLOCK_SIZE,
            breakpoints=request.breakpoints,
            junctions=scheduled.junctions,
            waiting_junctions=self._waiting.junctions(lease.chain.hashes, start, end),
            fallback_step=self._fallback_step,
            num_survived_tokens=lease.num_survived_tokens,
            interval=self._interval,
        )
        self._cache.filing.plan_saves(lease, start, end, self._capture.candidates(context))
        builder.add_prefill(scheduled, end)
