"""The rows of the batch: who has one, who is on the way out, which rows the runner has yet to clear."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from forkpoint.sched.plan import NO_ROW
from forkpoint.sched.scheduled_request import IssuedStep, ScheduledRequest


class RunningSet:
    """Entries that have a row. An scheduled whose steps are in flight keeps its row until they end; `issued` are the
    steps in flight.

    To be read by others: `requests`, those that may be planned, in order; `leaving`, those that leave once the steps in
    flight have ended; `free_rows`; `removed_rows`, those freed since the last `drain_removed`.
    """

    def __init__(self, num_rows: int, issued: Sequence[IssuedStep]) -> None:
        self.requests: list[ScheduledRequest] = []
        self.leaving: list[ScheduledRequest] = []
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.removed_rows: list[int] = []
        self._issued = issued

    def start(self, scheduled: ScheduledRequest) -> None:
        """Give a waiting scheduled a row."""
        scheduled.row = self.free_rows.pop()
        bisect.insort(self.requests, scheduled, key=lambda e: e.order)

    def leave(self, scheduled: ScheduledRequest) -> bool:
        """Plan the scheduled no more. True if nothing of it is in flight, so that it can `vacate` now."""
        self.requests.remove(scheduled)
        scheduled.leaving = True
        if self._in_flight(scheduled):
            self.leaving.append(scheduled)
            return False
        return True

    def _in_flight(self, scheduled: ScheduledRequest) -> bool:
        return bool(self._issued) and scheduled.last_step >= self._issued[0].plan.step

    def take_ready(self) -> list[ScheduledRequest]:
        """Leaving requests of which nothing is in flight any more; each has to `vacate`."""
        ready = [scheduled for scheduled in self.leaving if not self._in_flight(scheduled)]
        self.leaving = [scheduled for scheduled in self.leaving if self._in_flight(scheduled)]
        return ready

    def vacate(self, scheduled: ScheduledRequest) -> None:
        """Free the scheduled's row."""
        scheduled.leaving = False
        self.removed_rows.append(scheduled.row)
        self.free_rows.append(scheduled.row)
        scheduled.row = NO_ROW

    def drain_removed(self) -> tuple[int, ...]:
        """Rows freed since the last call; the next plan must name them."""
        removed, self.removed_rows = tuple(self.removed_rows), []
        return removed

    def last_unplanned(self, step: int) -> ScheduledRequest | None:
        """The last scheduled in order that step `step` has not planned: the one to preempt first."""
        return next((scheduled for scheduled in reversed(self.requests) if scheduled.last_step != step), None)
