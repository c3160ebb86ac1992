"""Departures: requests leave the batch because another one needs their memory, or because they have ended."""

from __future__ import annotations

from forkpoint.cache.manager import CacheManager
from forkpoint.sched.admission import Admission
from forkpoint.sched.running import RunningSet
from forkpoint.sched.scheduled_request import ScheduledRequest


class Departures:
    """Takes requests out of the batch and gives back what they hold. Preempted requests wait again.

    A request with steps in flight gives everything back once they have ended. Others read `num_preemptions`.
    """

    def __init__(
        self, cache: CacheManager, running: RunningSet, admission: Admission, state_write_interval: int
    ) -> None:
        self._cache = cache
        self._interval = state_write_interval
        self._running = running
        self._admission = admission
        self.num_preemptions = 0

    def make_room(self, scheduled: ScheduledRequest, step: int, may_preempt_itself: bool) -> bool:
        """Stop the restore, or else preempt the last request without a row in `step` that comes after `scheduled`.

        Returns whether there may be room now. False: `scheduled` has to wait, or was preempted itself.
        """
        if self._cache.tiers.restoring.drop():
            return True
        if self._running.leaving:
            return False  # their pages come back with the results in flight
        victim = self._running.last_unplanned(step)
        if victim is None or victim.order < scheduled.order:
            return False
        if victim is scheduled:
            if may_preempt_itself and len(self._running.requests) > 1:
                self.preempt(scheduled)
            return False
        self.preempt(victim)
        return not self._running.leaving

    def preempt(self, scheduled: ScheduledRequest) -> None:
        self.num_preemptions += 1
        scheduled.request.num_preemptions += 1
        self.leave(scheduled)

    def preempt_all(self) -> None:
        for scheduled in list(self._running.requests):
            self.preempt(scheduled)

    def leave(self, scheduled: ScheduledRequest) -> None:
        """Stop planning a running request, and release it now or once its steps in flight have ended."""
        if self._running.leave(scheduled):
            self._release(scheduled)

    def release_ready(self) -> None:
        """Release the leaving requests that no longer have a step in flight."""
        for scheduled in self._running.take_ready():
            self._release(scheduled)

    def _release(self, scheduled: ScheduledRequest) -> None:
        """Give back what a request holds, none of whose steps is in flight. It waits again unless it has ended."""
        request, lease = scheduled.request, scheduled.lease
        flush = scheduled.last_flush(self._interval, self._cache.arena.issued_slot(lease.slot))
        self._running.vacate(scheduled, flush)
        self._cache.extend(lease, scheduled.tokens_beyond_chain(request.num_tokens))
        # A request that ended in mid-step has computed tokens past its end: the hash chain does not name its state.
        is_named = lease.num_planned <= request.num_tokens
        awaits_tool = scheduled.ended and request.awaits_tool
        scheduled.lease = self._cache.release(lease, donate=is_named, awaits_tool=awaits_tool)
        if scheduled.ended:
            self._cache.forget_private(lease, request.num_prompt_tokens)
            return
        scheduled.junctions = frozenset()
        scheduled.restores, scheduled.num_restored_tokens = True, 0
        self._admission.enqueue(scheduled)
