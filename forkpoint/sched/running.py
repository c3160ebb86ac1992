"""The rows of the batch: who has one, who is leaving, and which rows the runner has yet to clear."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from forkpoint.sched.issued_step import IssuedStep
from forkpoint.sched.plan import NO_ROW, StateFlush
from forkpoint.sched.scheduled_request import ScheduledRequest


class RunningSet:
    """Requests that have a row. A request with steps in flight keeps its row until they end.

    Others read `requests`, which may be planned, in order; `leaving`, which leave once their steps in flight have
    ended; `free_rows`; and `removed_rows`, freed since the last `drain_removed`.
    """

    def __init__(self, num_rows: int, issued: Sequence[IssuedStep]) -> None:
        """`issued` are the steps in flight, oldest first; the scheduler keeps them up to date."""
        self.requests: list[ScheduledRequest] = []
        self.leaving: list[ScheduledRequest] = []
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.removed_rows: list[int] = []
        self._flushes: list[StateFlush] = []
        self._issued = issued

    def start(self, scheduled: ScheduledRequest) -> None:
        """Give a waiting request a row, of which one must be free."""
        scheduled.row = self.free_rows.pop()
        bisect.insort(self.requests, scheduled, key=lambda each: each.order)

    def leave(self, scheduled: ScheduledRequest) -> bool:
        """Stop planning the request. True if none of its steps is in flight, so that it can `vacate` now.

        Otherwise it joins `leaving` until `take_ready` returns it.
        """
        self.requests.remove(scheduled)
        scheduled.leaving = True
        if self._in_flight(scheduled):
            self.leaving.append(scheduled)
            return False
        return True

    def _in_flight(self, scheduled: ScheduledRequest) -> bool:
        return bool(self._issued) and scheduled.last_step >= self._issued[0].plan.step

    def take_ready(self) -> list[ScheduledRequest]:
        """Take from `leaving` the requests without a step in flight; each of them has to `vacate`."""
        ready = [each for each in self.leaving if not self._in_flight(each)]
        self.leaving = [each for each in self.leaving if self._in_flight(each)]
        return ready

    def vacate(self, scheduled: ScheduledRequest, flush: StateFlush | None) -> None:
        """Free the row of a request that has left, and note it for `drain_removed`, with what completes its state."""
        scheduled.leaving = False
        if flush is not None:
            self._flushes.append(flush)
        self.removed_rows.append(scheduled.row)
        self.free_rows.append(scheduled.row)
        scheduled.row = NO_ROW

    def drain_removed(self) -> tuple[tuple[int, ...], tuple[StateFlush, ...]]:
        """Return the rows freed since the last call, and their flushes, and forget them; the next plan has both."""
        drained = tuple(self.removed_rows), tuple(self._flushes)
        self.removed_rows, self._flushes = [], []
        return drained

    def last_unplanned(self, step: int) -> ScheduledRequest | None:
        """Return the last request in order without a row in step `step`, the one to preempt first.

        None if all of them have one.
        """
        return next((each for each in reversed(self.requests) if each.last_step != step), None)
