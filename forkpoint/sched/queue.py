"""The waiting queue, which is also an oracle: it knows which prefixes will be asked for next."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.entry import Entry
from forkpoint.sched.interest import PrefixInterest


class WaitingQueue:
    """Entries by (priority, arrival), for others to read in `entries`. Knows how many of their prompts contain a
    block."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._interest = PrefixInterest()

    def add(self, entry: Entry) -> None:
        bisect.insort(self.entries, entry, key=lambda e: e.order)
        self._interest.add(self._reusable_hashes(entry))

    def remove(self, entry: Entry) -> None:
        index = bisect.bisect_left(self.entries, entry.order, key=lambda e: e.order)
        assert self.entries[index] is entry
        del self.entries[index]
        self._interest.remove(self._reusable_hashes(entry))

    def is_more_urgent(self, entry: Entry) -> bool:
        """Whether a request of smaller priority value than `entry`'s is waiting."""
        return bool(self.entries) and self.entries[0].order[0] < entry.order[0]

    def junctions(self, hashes: Sequence[BlockHash], start: int, end: int) -> frozenset[int]:
        """Positions in `(start, end]` of the history `hashes` at which a waiting prompt parts from it."""
        junctions: list[int] = []
        before = 0
        counts = itertools.chain(self._interest.counts(hashes), [0])
        for position, here in zip(itertools.count(0, BLOCK_SIZE), counts, strict=False):
            if position > end:
                break
            if here < before and position > start:
                junctions.append(position)
            before = here
        return frozenset(junctions)

    def _reusable_hashes(self, entry: Entry) -> list[BlockHash]:
        usable = CacheLayout.usable_prefix(entry.request.num_tokens)
        return entry.lease.chain.hashes[: usable // BLOCK_SIZE]
