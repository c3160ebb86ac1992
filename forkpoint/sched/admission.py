"""Admission: start waiting requests, each from its longest cached prefix."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from forkpoint.cache.fetched import FetchedPrompts
from forkpoint.cache.lookup import NOTHING, PrefixHit
from forkpoint.cache.manager import CacheManager
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.chunks import Chunks
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.running import RunningSet
from forkpoint.sched.scheduled_request import ScheduledRequest

MIN_GAIN_TO_WAIT = 256  # tokens; a request waits one step for another's state only if that saves as much
MAX_PASSED_OVER = 32  # waiting requests passed over in a step, so that a long queue costs no more than a short one


class AdmissionOutcome(Enum):
    """The outcome of a step for a waiting request."""

    STARTED = auto()
    PASSED_OVER = auto()  # it waits, and requests after it may start
    NO_MEMORY = auto()  # it waits for memory, and all requests after it wait too


class Admission:
    """Queues requests, and moves them to the batch while rows, the budget of tokens and memory last."""

    def __init__(
        self,
        cache: CacheManager,
        waiting: WaitingQueue,
        running: RunningSet,
        chunks: Chunks,
        clock: Callable[[], float],
    ) -> None:
        self._cache, self._tiers = cache, cache.tiers
        self._waiting = waiting
        self._running = running
        self._chunks = chunks
        self._clock = clock

    def enqueue(self, scheduled: ScheduledRequest) -> None:
        """Queue a request. If others come before it, protect the checkpoint that it would resume from until then."""
        if self._running.requests or self._waiting.requests:
            scheduled.expected = self.lookup(scheduled).checkpoint
            self._cache.expect(scheduled.expected, 1)
        self._waiting.add(scheduled)

    def withdraw(self, scheduled: ScheduledRequest) -> None:
        """Take a request that has ended off the queue, with all that was kept or restored for it."""
        self._waiting.remove(scheduled)
        self._tiers.stop_waiting(scheduled.lease)
        self._cache.expect(scheduled.expected, -1)

    def admit_waiting(
        self,
        builder: PlanBuilder,
        more_urgent_than: ScheduledRequest | None = None,
        only: ScheduledRequest | None = None,
    ) -> None:
        """Start waiting requests in their order, and add what they compute to the plan.

        With `more_urgent_than`, start only those of a smaller priority value; with `only`, that request alone.
        """
        passed_over = 0
        for scheduled in list(self._waiting.requests) if only is None else [only]:
            if not self._running.free_rows or builder.budget <= 0 or passed_over > MAX_PASSED_OVER:
                return
            if more_urgent_than is not None and scheduled.order[0] >= more_urgent_than.order[0]:
                return
            outcome = self._try(builder, scheduled, is_alone=only is not None)
            if outcome is AdmissionOutcome.NO_MEMORY:
                return
            passed_over += outcome is AdmissionOutcome.PASSED_OVER

    def _try(self, builder: PlanBuilder, scheduled: ScheduledRequest, is_alone: bool) -> AdmissionOutcome:
        """Start a request unless it has to wait for memory, for budget, or for a prefix that it will have soon.

        A request that `is_alone` waits for no restore and no other engine.
        """
        request, lease, peers = scheduled.request, scheduled.lease, self._tiers.fetched
        if peers is not None and not is_alone and peers.is_waiting(lease):
            self._land(scheduled, peers)
            return AdmissionOutcome.PASSED_OVER
        usable = self._cache.layout.usable_prefix(request.num_tokens)
        if builder.budget < BLOCK_SIZE and not self._may_end(builder, scheduled, usable):
            return AdmissionOutcome.PASSED_OVER
        # A state that this plan saves may serve the request in the next step.
        num_soon = self._cache.filing.longest_reusable_next(lease, usable)
        fits = num_soon >= MIN_GAIN_TO_WAIT or self._may_fit(builder, scheduled)
        if not fits and not (self._drop_later_restore(scheduled) and self._may_fit(builder, scheduled)):
            return AdmissionOutcome.NO_MEMORY
        hit = self.lookup(scheduled) if is_alone else self._restored(scheduled)
        if hit is None or num_soon - hit.num_tokens >= MIN_GAIN_TO_WAIT:
            return AdmissionOutcome.PASSED_OVER
        start, prefill_end = hit.num_tokens, self._chunks.prefill_end(request)
        if start < prefill_end and self._chunks.end(request, start, prefill_end, builder.budget) <= start:
            return AdmissionOutcome.PASSED_OVER
        return AdmissionOutcome.STARTED if self._admit(builder, scheduled, hit) else AdmissionOutcome.NO_MEMORY

    def lookup(self, scheduled: ScheduledRequest) -> PrefixHit:
        """Return the longest prefix of a waiting request that the arena has. Changes nothing."""
        request = scheduled.request
        return self._cache.lookup(scheduled.lease, request.num_tokens, request.reads_cache)

    def try_jump(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> None:
        """Continue a prefill from a longer prefix if another request has cached more of its prompt meanwhile.

        The plan then resends the row's block table, and the request's cache report grows.
        """
        lease, request = scheduled.lease, scheduled.request
        if lease.detached or not request.reads_cache or not self._cache.has_next_block(lease):
            return
        hit = self._cache.lookup(lease, scheduled.prefill_end)
        start = lease.num_planned
        if hit.num_tokens > start:
            self._cache.jump(lease, hit)
            builder.replace_prefix(scheduled)
            scheduled.record_hit(hit, gained=hit.num_tokens - start)

    def _restored(self, scheduled: ScheduledRequest) -> PrefixHit | None:
        """Return the arena's hit, or the longer one that a restore has completed by now.

        Begins the restore, or takes its next step. Returns None if the request has to wait for its own restore or for
        one that comes first. A restore that was dropped for lack of memory is not tried again in this run of the
        request.
        """
        restoring, request, lease = self._tiers.restoring, scheduled.request, scheduled.lease
        if not scheduled.restores or not request.reads_cache:
            return self.lookup(scheduled)
        is_busy = bool(self._running.requests)
        if not restoring.is_for(lease):
            hit = self.lookup(scheduled)
            found = restoring.find(lease, request.num_tokens, hit)
            if found is None or not restoring.pays(*found, hit, is_busy=is_busy):
                return hit
            if restoring.current is not None and not self._drop_later_restore(scheduled):
                return None
            if not self._fits(scheduled, hit, spare_slots=1):
                return hit
            restoring.begin(lease, scheduled.order, *found, hit)
        restore = restoring.current
        if restoring.advance(is_busy=is_busy):
            return self.lookup(scheduled)
        if restoring.is_for(lease):
            return None
        assert restore is not None
        scheduled.restores = restore.source.has_lost(restore.end)
        return self._restored(scheduled)  # the source may have a shorter prefix that is sound

    def _land(self, scheduled: ScheduledRequest, peers: FetchedPrompts) -> None:
        """Restore what has arrived of a prompt that another engine still sends, unless another prefix is restored."""
        restoring, lease = self._tiers.restoring, scheduled.lease
        end = peers.arriving(lease)
        if end is None or not scheduled.restores:
            return
        if not restoring.is_for(lease):
            hit = self.lookup(scheduled)
            if restoring.current is not None or not self._fits(scheduled, hit, spare_slots=1):
                return
            peers.begin_landing(lease, hit.num_tokens)
            restoring.begin(lease, scheduled.order, peers, end, hit)
        restoring.advance(is_busy=bool(self._running.requests))

    def _drop_later_restore(self, scheduled: ScheduledRequest) -> bool:
        """Stop a restore for a request that comes after this one, or of a prompt that has not arrived.

        Returns whether there was one.
        """
        restoring = self._tiers.restoring
        return not restoring.comes_before(scheduled.order) and restoring.drop()

    def _may_end(self, builder: PlanBuilder, scheduled: ScheduledRequest, usable: int) -> bool:
        """Return False, without a lookup, if the budget cannot take the request to the end of its prefill.

        This is for budgets below a block: such a chunk may end only where the prefill ends. `usable` is the longest
        possible hit.
        """
        rest = self._chunks.prefill_end(scheduled.request) - usable
        return rest <= builder.budget and (rest <= 0 or self._cache.may_hit(scheduled.lease, usable))

    def _may_fit(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> bool:
        """Return False, without a lookup, if the request has to wait for others to leave whatever a lookup finds."""
        if builder.budget < BLOCK_SIZE or not self._others_hold_pages(scheduled):
            return True
        return self._cache.room.may_fit(scheduled.lease, scheduled.request.num_tokens + 1, len(self._running.requests))

    def _fits(self, scheduled: ScheduledRequest, hit: PrefixHit, spare_slots: int = 0) -> bool:
        """Return whether the request could produce a token after `hit`, with a block left for each running request."""
        num_tokens, spare_blocks = scheduled.request.num_tokens + 1, len(self._running.requests)
        return self._cache.room.fits(hit, num_tokens, spare_blocks, spare_slots)

    def _admit(self, builder: PlanBuilder, scheduled: ScheduledRequest, hit: PrefixHit) -> bool:
        """Give a request a row that starts after `hit`, and plan its first tokens. Without memory for that, start at 0.

        May drop a later request's restore to make room. Returns False if the request has to wait for memory; it then
        holds none.
        """
        request, lease = scheduled.request, scheduled.lease
        if not self._fits(scheduled, hit):
            if self._drop_later_restore(scheduled):
                return self._admit(builder, scheduled, hit)
            if self._others_hold_pages(scheduled):
                return False
            if not self._cache.room.fits(hit, request.num_tokens, 0):
                hit = NOTHING
        self._note_restored(scheduled, hit)
        self._cache.attach(lease, hit)
        start, prefill_end = hit.num_tokens, self._chunks.prefill_end(request)
        in_prefill = start < prefill_end
        end = self._chunks.end(request, start, prefill_end, builder.budget) if in_prefill else start + 1
        has_memory = self._cache.ensure_slot(lease) and self._cache.ensure_blocks(lease, end)
        if not has_memory and in_prefill and lease.windows and self._cache.ensure_slot(lease):
            # Tokens of a long chunk take blocks of windows that they need in this step alone. A shorter chunk fits.
            end = min(end, lease.num_blocks * BLOCK_SIZE)
            has_memory = start < end
        if not has_memory:
            scheduled.lease = self._cache.release(lease)
            if self._drop_later_restore(scheduled):
                return self._admit(builder, scheduled, self.lookup(scheduled))
            if self._others_hold_pages(scheduled) or hit is NOTHING:
                return False
            return self._admit(builder, scheduled, NOTHING)
        self._waiting.remove(scheduled)
        self._start(builder, scheduled, hit, prefill_end)
        if in_prefill:
            self._chunks.add(builder, scheduled, start, end)
        else:
            builder.add_decode(scheduled)
        return True

    def _note_restored(self, scheduled: ScheduledRequest, hit: PrefixHit) -> None:
        """Note how many tokens of a hit were restored for the request, and from where."""
        restoring, lease = self._tiers.restoring, scheduled.lease
        num_before: int | None = None
        if restoring.current is not None and restoring.is_for(lease):
            num_before, scheduled.restored_from = restoring.current.num_tokens_before, restoring.current.source.name
        peers = self._tiers.fetched
        if peers is not None and (num_landed_on := peers.num_tokens_before(lease)) is not None:
            num_before, scheduled.restored_from = num_landed_on, peers.name
        if num_before is not None:
            scheduled.num_restored_tokens = max(0, hit.num_tokens - num_before)
            if scheduled.restored_from == FetchedPrompts.name:  # no sample has shown yet that its numbers are finite
                lease.filed += hit.path[num_before // BLOCK_SIZE :]

    def _others_hold_pages(self, scheduled: ScheduledRequest) -> bool:
        """Return whether other requests hold memory that they will give back, restores included."""
        restoring = self._tiers.restoring
        if restoring.current is not None and not restoring.is_for(scheduled.lease):
            return True
        return bool(self._running.requests or self._running.leaving)

    def _start(self, builder: PlanBuilder, scheduled: ScheduledRequest, hit: PrefixHit, prefill_end: int) -> None:
        """Give the request a row in the batch and in the plan; count its query and report its hit."""
        request = scheduled.request
        self._cache.expect(scheduled.expected, -1)
        scheduled.expected = None
        self._running.start(scheduled)
        scheduled.prefill_end, scheduled.num_tokens_at_admission = prefill_end, request.num_tokens
        scheduled.junctions = self._cache.count_query(
            scheduled.lease, request.num_tokens, hit, scheduled.num_restored_tokens, scheduled.restored_from
        )
        scheduled.record_hit(hit)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
        builder.add_row(scheduled)
