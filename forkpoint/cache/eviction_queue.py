"""Cached entries in the order of their eviction."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from forkpoint.cache.tree import Evictable

Queued = TypeVar("Queued", bound=Evictable)
MIN_COMPACTED: Final = 1024  # items; a shorter queue costs less than its compaction
ITEMS_PER_ENTRY: Final = 4  # items that `first` looks at for each entry that it may return; some are outdated


class EvictionQueue(Generic[Queued]):
    """Orders entries by the key that the function `key` computes.

    A key may rise unnoticed, because an ancestor was removed: `lowest` computes it again. A key may fall by itself when
    `now` reaches `due(entry)`: then the entry is pushed again.

    Each push adds items `(key or due time, number, entry)` to two heaps. Items of earlier pushes stay there; their
    number is not the entry's `queue_number`.
    """

    def __init__(self, key: Callable[[Queued], float], due: Callable[[Queued], float]) -> None:
        self._key = key
        self._due = due
        self._by_key: list[tuple[float, int, Queued]] = []
        self._by_due: list[tuple[float, int, Queued]] = []
        self._numbers = itertools.count()
        self._compact_at = MIN_COMPACTED

    @property
    def num_items(self) -> int:
        """Items in both heaps, including the outdated ones."""
        return len(self._by_key) + len(self._by_due)

    def push(self, entry: Queued) -> None:
        """Queue an entry, or queue it again after its facts changed. One that cannot be evicted is left out."""
        if not entry.is_evictable:
            return
        entry.queue_number = number = next(self._numbers)
        heapq.heappush(self._by_key, (self._key(entry), number, entry))
        due = self._due(entry)
        if due < math.inf:
            heapq.heappush(self._by_due, (due, number, entry))
        if self.num_items > self._compact_at:
            self._compact()

    def push_later(self, entry: Queued) -> None:
        """Queue an entry without computing its key, which `push_due` does when its turn comes."""
        entry.queue_number = number = next(self._numbers)
        heapq.heappush(self._by_due, (-math.inf, number, entry))

    def _compact(self) -> None:
        """Remove outdated items. An entry that is used again and again leaves many that would never come first."""
        for heap in (self._by_key, self._by_due):
            heap[:] = [item for item in heap if _is_current(*item)]
            heapq.heapify(heap)
        self._compact_at = max(2 * self.num_items, MIN_COMPACTED)

    def lowest(self, now: float) -> tuple[float, Queued] | None:
        """Return the evictable entry with the smallest key at time `now`; None if there is none. It stays queued.

        Entries that cannot be evicted now leave the queue; push them again when they can.
        """
        self.push_due(now)
        while self._by_key:
            key, number, entry = self._by_key[0]
            if not _is_current(key, number, entry):
                heapq.heappop(self._by_key)
                continue
            current = self._key(entry)
            if current <= key:
                return current, entry
            heapq.heapreplace(self._by_key, (current, number, entry))
        return None

    def first(self, now: float, most: int) -> list[Queued]:
        """Return up to `most` entries that `lowest` will return next, beginning with the one of time `now`.

        The others come in the order of keys that may have changed since, and some of the next ones may be missing.
        """
        found = list[Queued]()
        if self.lowest(now) is None:
            return found
        nearest = [(self._by_key[0], 0)]  # items with their index in the heap, whose parents were looked at
        for _ in range(ITEMS_PER_ENTRY * most):
            if not nearest or len(found) == most:
                break
            item, index = heapq.heappop(nearest)
            if _is_current(*item):
                found.append(item[2])
            for child in range(2 * index + 1, min(2 * index + 3, len(self._by_key))):
                heapq.heappush(nearest, (self._by_key[child], child))
        return found

    def push_due(self, now: float, most: float = math.inf) -> None:
        """Push again up to `most` entries whose keys may have fallen by `now`.

        `lowest` pushes the rest. Whoever takes units calls this, so that the first one who has to evict does not pay
        for all entries at once.
        """
        due = list[Queued]()
        while self._by_due and self._by_due[0][0] <= now and len(due) < most:
            item = heapq.heappop(self._by_due)
            if _is_current(*item):
                due.append(item[2])
        for entry in due:
            self.push(entry)


def _is_current(_: float, number: int, entry: Evictable) -> bool:
    """Return whether an item is of its entry's last push, and the entry can be evicted."""
    return entry.queue_number == number and entry.is_evictable
