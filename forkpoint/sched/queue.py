"""The waiting queue, which is also an oracle: it knows which prefixes will be asked for next."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import CacheLayout
from forkpoint.sched.entry import Entry


class WaitingQueue:
    """Entries by (priority, arrival). Counts, for each block hash, the waiting prompts that contain it."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._entries: list[Entry] = []
        self._interest: Counter[BlockHash] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def add(self, entry: Entry) -> None:
        bisect.insort(self._entries, entry, key=lambda e: e.order)
        self._interest.update(self._reusable_hashes(entry))

    def remove(self, entry: Entry) -> None:
        index = bisect.bisect_left(self._entries, entry.order, key=lambda e: e.order)
        assert self._entries[index] is entry
        del self._entries[index]
        interest = self._interest
        for block_hash in self._reusable_hashes(entry):
            left = interest.pop(block_hash) - 1
            if left:
                interest[block_hash] = left

    def is_more_urgent(self, entry: Entry) -> bool:
        """Whether a request of smaller priority value than `entry`'s is waiting."""
        return bool(self._entries) and self._entries[0].order[0] < entry.order[0]

    def junctions(self, hashes: Sequence[BlockHash], start: int, end: int) -> frozenset[int]:
        """Positions in `(start, end]` of the history `hashes` at which a waiting prompt parts from it."""
        size, interest = self._layout.block_size, self._interest
        junctions: list[int] = []
        before = 0
        for index in range(start // size, end // size + 1):
            # Who contains a block contains all before it: from the first block that nobody contains there are no more.
            here = interest.get(hashes[index], 0) if index < len(hashes) else 0
            if here < before:
                junctions.append(index * size)
            if not here:
                break
            before = here
        return frozenset(junctions)

    def _reusable_hashes(self, entry: Entry) -> list[BlockHash]:
        usable = self._layout.usable_prefix(entry.request.num_tokens)
        return entry.lease.chain.hashes[: usable // self._layout.block_size]
