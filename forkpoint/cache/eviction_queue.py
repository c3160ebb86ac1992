"""Cached entries in the order of their eviction."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from forkpoint.cache.tree import Evictable

Queued = TypeVar("Queued", bound=Evictable)
LEAST_COMPACTED: Final = 1024  # places; a shorter queue costs less than its compaction
LOOKED_AT: Final = 4  # places that `first` looks at for each entry that it may return; some are old


class EvictionQueue(Generic[Queued]):
    """Orders entries by the key that the function `key` computes.

    A key may rise unnoticed, because an ancestor was dropped: `lowest` computes it again. A key may fall by itself when
    `now` reaches `due(entry)`: then the entry is queued again.
    """

    def __init__(self, key: Callable[[Queued], float], due: Callable[[Queued], float]) -> None:
        self._key = key
        self._due = due
        self._heap: list[tuple[float, int, Queued]] = []
        self._dues: list[tuple[float, int, Queued]] = []
        self._tickets = itertools.count()
        self._most_filed = LEAST_COMPACTED

    @property
    def num_filed(self) -> int:
        """Places taken, including the old places of entries that were queued again."""
        return len(self._heap) + len(self._dues)

    def push(self, entry: Queued) -> None:
        """Queue an entry, or queue it again after its facts changed. One that cannot be evicted is left out."""
        if not entry.is_evictable:
            return
        entry.queue_place = ticket = next(self._tickets)
        heapq.heappush(self._heap, (self._key(entry), ticket, entry))
        due = self._due(entry)
        if due < math.inf:
            heapq.heappush(self._dues, (due, ticket, entry))
        if self.num_filed > self._most_filed:
            self._compact()

    def push_later(self, entry: Queued) -> None:
        """Queue an entry without computing its key, which `file_due` computes when its turn comes."""
        entry.queue_place = ticket = next(self._tickets)
        heapq.heappush(self._dues, (-math.inf, ticket, entry))

    def _compact(self) -> None:
        """Remove old places. An entry that is used again and again leaves many that would never come to the front."""
        for heap in (self._heap, self._dues):
            heap[:] = [filed for filed in heap if filed[2].queue_place == filed[1] and not filed[2].dropped]
            heapq.heapify(heap)
        self._most_filed = max(2 * self.num_filed, LEAST_COMPACTED)

    def lowest(self, now: float) -> tuple[float, Queued] | None:
        """Return the evictable entry with the smallest key at time `now`; None if there is none. It stays queued.

        Entries that cannot be evicted now leave the queue; push them again when they can.
        """
        self.file_due(now)
        while self._heap:
            key, ticket, entry = self._heap[0]
            if entry.queue_place != ticket or entry.dropped or not entry.is_evictable:
                heapq.heappop(self._heap)
                continue
            current = self._key(entry)
            if current <= key:
                return current, entry
            heapq.heapreplace(self._heap, (current, ticket, entry))
        return None

    def first(self, now: float, most: int) -> list[Queued]:
        """Return up to `most` entries that `lowest` will return next, beginning with the one of time `now`.

        The others come in the order of keys that may have changed since, and some of the next ones may be missing.
        """
        found = list[Queued]()
        if self.lowest(now) is None:
            return found
        places = [(self._heap[0], 0)]  # of the heap, each after the one above it
        for _ in range(LOOKED_AT * most):
            if not places or len(found) == most:
                break
            (_, ticket, entry), place = heapq.heappop(places)
            if entry.queue_place == ticket and not entry.dropped and entry.is_evictable:
                found.append(entry)
            for below in range(2 * place + 1, min(2 * place + 3, len(self._heap))):
                heapq.heappush(places, (self._heap[below], below))
        return found

    def file_due(self, now: float, most: float = math.inf) -> None:
        """Queue entries again whose keys may have fallen by `now`, at most `most` of them.

        `lowest` does the rest. Whoever takes units calls this, so that the first one who has to evict does not pay for
        all entries at once.
        """
        due = list[Queued]()
        while self._dues and self._dues[0][0] <= now and len(due) < most:
            _, ticket, entry = heapq.heappop(self._dues)
            if entry.queue_place == ticket and not entry.dropped and entry.is_evictable:
                due.append(entry)
        for entry in due:
            self.push(entry)
