"""The rows of the batch: who has one, who is on the way out, which rows the runner has yet to clear."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from forkpoint.sched.entry import Entry, IssuedStep
from forkpoint.sched.plan import NO_ROW


class RunningSet:
    """Entries that have a row. An entry whose steps are in flight keeps its row until they end; `issued` are the
    steps in flight.

    To be read by others: `entries`, those that may be planned, in order; `leaving`, those that leave once the steps in
    flight have ended; `free_rows`; `removed_rows`, those freed since the last `drain_removed`.
    """

    def __init__(self, num_rows: int, issued: Sequence[IssuedStep]) -> None:
        self.entries: list[Entry] = []
        self.leaving: list[Entry] = []
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.removed_rows: list[int] = []
        self._issued = issued

    def start(self, entry: Entry) -> None:
        """Give a waiting entry a row."""
        entry.row = self.free_rows.pop()
        bisect.insort(self.entries, entry, key=lambda e: e.order)

    def leave(self, entry: Entry) -> bool:
        """Plan the entry no more. True if nothing of it is in flight, so that it can `vacate` now."""
        self.entries.remove(entry)
        entry.leaving = True
        if self._in_flight(entry):
            self.leaving.append(entry)
            return False
        return True

    def _in_flight(self, entry: Entry) -> bool:
        return bool(self._issued) and entry.planned_step >= self._issued[0].plan.step

    def take_ready(self) -> list[Entry]:
        """Leaving entries of which nothing is in flight any more; each has to `vacate`."""
        ready = [entry for entry in self.leaving if not self._in_flight(entry)]
        self.leaving = [entry for entry in self.leaving if self._in_flight(entry)]
        return ready

    def vacate(self, entry: Entry) -> None:
        """Free the entry's row."""
        entry.leaving = False
        self.removed_rows.append(entry.row)
        self.free_rows.append(entry.row)
        entry.row = NO_ROW

    def drain_removed(self) -> tuple[int, ...]:
        """Rows freed since the last call; the next plan must name them."""
        removed, self.removed_rows = tuple(self.removed_rows), []
        return removed

    def last_unplanned(self, step: int) -> Entry | None:
        """The last entry in order that step `step` has not planned: the one to preempt first."""
        return next((entry for entry in reversed(self.entries) if entry.planned_step != step), None)
