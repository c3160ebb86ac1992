"""What gives way when the arena is full. Policies are pure: they turn one entry's facts into a number."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

from forkpoint.cache.tree import Origin


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Time to compute tokens `[start, end)` of a prompt, up to a factor.

    `per_token` covers the matrix products, `per_pair` one query attending to one key.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def __call__(self, start: int, end: int) -> float:
        pairs = (end - start) * (start + end) / 2
        return (end - start) * self.per_token + pairs * self.per_pair


class EntryFacts(NamedTuple):
    """What a policy may know of a cached entry.

    `saved` is the recompute cost from the nearest surviving ancestor checkpoint, `num_bytes` the slot plus
    the keys and values that only this entry makes useful, `last_used` a reading of the cache's clock (bytes
    ever handed out, in arenas).
    """

    origin: Origin
    saved: float
    num_bytes: int
    last_used: float
    num_hits: int
    num_expected: int
    superseded: bool


class EvictionPolicy(Protocol):
    """Orders entries; the smallest key gives way first."""

    name: str

    def key(self, entry: EntryFacts) -> float: ...


class LRUPolicy:
    """The entry used longest ago gives way."""

    name = "lru"

    def key(self, entry: EntryFacts) -> float:
        return math.inf if entry.num_expected else entry.last_used


class LFUPolicy:
    """The entry used least often gives way; of two, the one used longest ago."""

    name = "lfu"

    def key(self, entry: EntryFacts) -> float:
        if entry.num_expected:
            return math.inf
        return entry.num_hits + entry.last_used / (1 + entry.last_used)


class CostPolicy:
    """Chance of reuse x recompute cost saved / bytes gives way from the small end.

    The chance starts at a prior by origin, grows with hits, and halves with every `half_life` arenas of new
    data since the last use. That decay is common to all entries, so the order of two entries never changes
    between uses and the logarithm of the value needs no refresh as time goes by.
    """

    name = "cost"
    PRIORS: ClassVar[dict[Origin, float]] = {
        Origin.JUNCTION: 0.6,
        Origin.DECODE: 0.5,
        Origin.PROMPT_END: 0.5,
        Origin.DECLARED: 0.4,
        Origin.INTERVAL: 0.02,
    }
    SUPERSEDED_FACTOR = 0.2
    EXPECTED_FACTOR = 1e6  # a waiting request is known to resume there

    def __init__(self, half_life: float = 0.25) -> None:
        self._decay = math.log(2) / half_life

    def key(self, entry: EntryFacts) -> float:
        prior = self.PRIORS[entry.origin]
        chance = 1 - (1 - prior) * 0.5**entry.num_hits
        if entry.superseded and entry.num_hits < 2:
            chance *= self.SUPERSEDED_FACTOR
        if entry.num_expected:
            chance *= self.EXPECTED_FACTOR
        return math.log(max(chance * entry.saved / max(entry.num_bytes, 1), 1e-300)) + entry.last_used * self._decay


_POLICIES: Final[Mapping[str, type[EvictionPolicy]]] = MappingProxyType(
    {"cost": CostPolicy, "lru": LRUPolicy, "lfu": LFUPolicy}
)
EVICTION_POLICIES: Final = tuple(_POLICIES)


def make_policy(name: str) -> EvictionPolicy:
    """The eviction policy of that name."""
    return _POLICIES[name]()


class Queued(Protocol):
    """An entry of the eviction queue; the queue writes `queue_entry` and reads `dropped`."""

    queue_entry: int
    dropped: bool


Entry = TypeVar("Entry", bound=Queued)


class EvictionQueue(Generic[Entry]):
    """Entries by key. An entry's key may rise unnoticed (an ancestor was dropped): `lowest` looks again."""

    def __init__(self, key: Callable[[Entry], float], evictable: Callable[[Entry], bool]) -> None:
        self._key = key
        self._evictable = evictable
        self._heap: list[tuple[float, int, Entry]] = []
        self._tickets = itertools.count()

    def push(self, entry: Entry) -> None:
        """Add an entry, or file it anew after its facts changed."""
        entry.queue_entry = next(self._tickets)
        heapq.heappush(self._heap, (self._key(entry), entry.queue_entry, entry))

    def lowest(self) -> tuple[float, Entry] | None:
        """The evictable entry of the smallest key, which stays in the queue; None if there is none.

        Entries that cannot go now leave the queue; push them again when they can.
        """
        while self._heap:
            key, ticket, entry = self._heap[0]
            if entry.queue_entry != ticket or entry.dropped or not self._evictable(entry):
                heapq.heappop(self._heap)
                continue
            now = self._key(entry)
            if now <= key:
                return now, entry
            heapq.heapreplace(self._heap, (now, ticket, entry))
        return None

    def clear(self) -> None:
        self._heap.clear()
