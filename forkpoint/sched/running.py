"""The rows of the batch: who has one, who is on the way out, which rows the runner has yet to clear."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from forkpoint.sched.entry import NO_ROW, Entry, Leaving


class RunningSet:
    """Entries that have a row, by order. An entry whose steps are in flight keeps its row until they end."""

    def __init__(self, num_rows: int) -> None:
        self._entries: list[Entry] = []
        self._leaving: list[Entry] = []
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._removed_rows: list[int] = []
        self._answered_step = -1

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Those that may be planned, in order; safe against changes on the way."""
        return iter(list(self._entries))

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    @property
    def leaving(self) -> list[Entry]:
        """Entries that leave once the steps in flight have ended."""
        return list(self._leaving)

    def start(self, entry: Entry) -> None:
        """Give a waiting entry a row."""
        entry.row = self._free_rows.pop()
        bisect.insort(self._entries, entry, key=lambda e: e.order)

    def leave(self, entry: Entry, why: Leaving) -> bool:
        """Plan the entry no more. True if nothing of it is in flight, so that it can `vacate` now."""
        self._entries.remove(entry)
        entry.leaving = why
        if self._in_flight(entry):
            self._leaving.append(entry)
            return False
        return True

    def answered(self, step: int) -> None:
        """The results of all steps up to `step` are known."""
        self._answered_step = step

    def _in_flight(self, entry: Entry) -> bool:
        return entry.planned_step > self._answered_step

    def take_ready(self) -> list[Entry]:
        """Leaving entries of which nothing is in flight any more; each has to `vacate`."""
        if not self._leaving:
            return []
        ready = [entry for entry in self._leaving if not self._in_flight(entry)]
        self._leaving = [entry for entry in self._leaving if self._in_flight(entry)]
        return ready

    def vacate(self, entry: Entry) -> Leaving:
        """Free the entry's row; returns why it left."""
        why, entry.leaving = entry.leaving, None
        assert why is not None
        self._removed_rows.append(entry.row)
        self._free_rows.append(entry.row)
        entry.row = NO_ROW
        return why

    def drain_removed(self) -> tuple[int, ...]:
        """Rows freed since the last call; the next plan must name them."""
        removed, self._removed_rows = tuple(self._removed_rows), []
        return removed

    def last_unplanned(self, step: int) -> Entry | None:
        """The last entry in order that step `step` has not planned: the one to preempt first."""
        return next((entry for entry in reversed(self._entries) if entry.planned_step != step), None)
