"""The disks of several ranks as one: entries that all of them have, tickets that all of them report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from forkpoint.cache.tier_entries import DiskFacts, Records
from forkpoint.sched.plan import TierReport


class TierTickets:
    """Counts which tickets all ranks have reported. A ticket has failed if it failed on one of them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reported = Counter[int]()
        self._failed = set[int]()
        self._writes = True

    def merge(self, reports: Sequence[TierReport]) -> TierReport | None:
        """Return the tickets that all ranks have reported by now, each once. None: there are none."""
        for each in reports:
            self._writes = self._writes and each.writes
            self._reported.update((*each.done, *each.failed))
            self._failed.update(each.failed)
        complete = [ticket for ticket, count in self._reported.items() if count == self._num_ranks]
        if not complete:
            return None
        for ticket in complete:
            del self._reported[ticket]
        failed = tuple(ticket for ticket in complete if ticket in self._failed)
        self._failed.difference_update(failed)
        return TierReport(tuple(ticket for ticket in complete if ticket not in failed), failed, self._writes)


def common_disk(disks: Sequence[DiskFacts | None]) -> DiskFacts | None:
    """Return the disk tier with the entries that all ranks have in the same unit; None if a rank has no disk tier.

    Written bytes are those of the rank that wrote most.
    """
    found = [disk for disk in disks if disk is not None]
    if len(found) < len(disks):
        return None
    first = found[0]
    names = [_names(disk.entries) for disk in found]
    shared = reduce(np.intersect1d, names)
    return replace(
        first,
        entries=first.entries[np.isin(names[0], shared)],
        window_start_s=max(disk.window_start_s for disk in found),
        window_bytes=max(disk.window_bytes for disk in found),
    )


def _names(entries: Records) -> npt.NDArray[np.uint64]:
    """Return a number for each record that is equal on all ranks: of its unit, its kind and half of its hash."""
    halves = np.ascontiguousarray(entries["hash"]).view("<u8").reshape(-1, 2)[:, 0]
    names: npt.NDArray[np.uint64] = halves ^ (entries["unit"].astype(np.uint64) << np.uint64(2)) ^ entries["kind"]
    return names
