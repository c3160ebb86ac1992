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
    ever handed out, in arenas). `superseded`: a later checkpoint of the same conversation exists; `num_turns` is how
    often the conversation that it ends was continued before; `reuse_distance` the median of the new data, in
    arenas, between two uses of an entry (the same for all entries).
    """

    origin: Origin
    saved: float
    num_bytes: int
    last_used: float
    num_hits: int
    num_expected: int
    superseded: bool
    num_turns: int = 0
    reuse_distance: float = 0.25


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

    The chance starts at a prior by origin; that of a conversation's end, and of its fallbacks, rises with every turn
    (the rule of succession, for conversations that stop after their first turn three times in four). All grow with
    hits. It
    decays with the new data since the last use, at a rate that the median reuse distance sets: where times until
    reuse are exponential and most entries are never reused, it halves with every median. That decay is common to
    all entries, so the order of two entries changes only when one is used (or the median is learnt anew), and the
    logarithm of the value needs no refresh as time goes by.
    """

    name = "cost"
    PRIORS: ClassVar[dict[Origin, float]] = {
        Origin.JUNCTION: 0.6,
        Origin.DECLARED: 0.4,
        Origin.INTERVAL: 0.02,
    }
    TURNS_CONTINUED, TURNS_ENDED = 1, 3  # what is taken as seen before the first turn
    SUPERSEDED_FACTOR = 0.2
    HALF_LIFE = 0.8  # median reuse distances; in the simulator all from 0.4 to 1 come close
    EXPECTED_FACTOR = 1e6  # a waiting request is known to resume there

    def key(self, entry: EntryFacts) -> float:
        prior = self.PRIORS.get(entry.origin)
        if prior is None:
            continued = self.TURNS_CONTINUED + entry.num_turns
            prior = continued / (continued + self.TURNS_ENDED)
        chance = 1 - (1 - prior) * 0.5**entry.num_hits
        if entry.superseded and entry.num_hits < 2:
            chance *= self.SUPERSEDED_FACTOR
        if entry.num_expected:
            chance *= self.EXPECTED_FACTOR
        value = math.log(max(chance * entry.saved / max(entry.num_bytes, 1), 1e-300))
        return value + entry.last_used * math.log(2) / (self.HALF_LIFE * entry.reuse_distance)


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

    def refresh(self) -> None:
        """Every key may have changed, either way."""
        live = [entry for _, ticket, entry in self._heap if entry.queue_entry == ticket and not entry.dropped]
        self._heap = [(self._key(entry), entry.queue_entry, entry) for entry in live]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        self._heap.clear()
