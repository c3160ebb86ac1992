"""Hazards: when checkpoints are used again, learnt from all of them by kind, uses so far and age.

Time counts new data, in arenas. The hazard `h(a)` of a class is its uses divided by its time at risk, at age `a`.
Evicted entries that are asked for again count as uses: hazards could otherwise never show more than the arena happens
to hold. `H` is the integral of `h`; `exp(-H)` is the survival, the share not used up to an age. The value of keeping an
entry of age `a` is its Gittins index (Gittins, Bandit Processes and Dynamic Allocation Indices, 1979): uses per time
held, if the entry is given up at the best age `s`:

    G(a) = max over s > a of  (1 - exp(H(a) - H(s))) / integral from a to s of exp(H(a) - H(t)) dt

An entry that has waited is worth more than a new one if its use comes late, for example because people read an answer
before they continue.
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.tree import Origin

FloatArray: TypeAlias = npt.NDArray[np.float64]

EDGES: Final = (0.0, *(2.0**power for power in range(-4, 5)))  # ages, in arenas; bin k is [EDGES[k], EDGES[k + 1])
NUM_BINS: Final = len(EDGES) - 1
ROUNDING: Final = 1e-6  # arenas; an age this close below an edge counts as beyond it
MOST_USES: Final = 5  # entries with this many uses or more are one class: there are too few of each to learn from
NUM_TRACKED: Final = 4096  # entries of a kind whose next use is awaited; bounds memory
FREE_PLACE: Final = -1  # instead of a number of uses: the place is free
UPDATE_EVERY: Final = 1 / 8  # arenas, for each kind; indices change slowly, and computing them takes milliseconds
HALF_FORGOTTEN: Final = 64.0  # arenas after which an observation counts half

_LOW: Final = np.asarray(EDGES[:-1])
_WIDTH: Final = np.diff(np.asarray(EDGES))


@enum.unique
class EndKind(enum.StrEnum):
    """Kinds of checkpoints that have no origin of their own."""

    TOOL_CALL = "tool_call"  # the end of a conversation whose answer calls a tool
    SUPERSEDED = "superseded"  # the end of an earlier turn

    __hash__ = str.__hash__  # `Origin` says why


Kind: TypeAlias = Origin | EndKind


class ReuseClass(NamedTuple):
    """Entries that are used alike: same kind, same uses so far. The end of a conversation counts its turns as uses."""

    kind: Kind
    uses: int = 0


class Prior(NamedTuple):
    """Assumptions about a kind before anything was seen.

    `chances[MOST_USES + 1]` are the chances of one more use, by uses so far; `ages[NUM_BINS]` the shares of the uses in
    each bin of ages. The assumption weighs as much as `num_entries` observed entries.
    """

    chances: FloatArray
    ages: FloatArray
    num_entries: float = 8.0


class KindHazards:
    """The entries of one kind that wait for their next use, and the hazards learnt from those that no longer do.

    Arrays are `[MOST_USES + 1, NUM_BINS]`.
    """

    def __init__(self, prior: Prior) -> None:
        in_bin = prior.chances[:, None] * prior.ages
        unused = 1 - np.cumsum(in_bin, axis=1) + in_bin / 2
        self._assumed_uses: FloatArray = prior.num_entries * in_bin
        self._assumed_time: FloatArray = prior.num_entries * unused * _WIDTH
        self._uses: list[list[float]] = np.zeros_like(in_bin).tolist()  # lists: single entries are added all the time
        self._time: list[list[float]] = np.zeros_like(in_bin).tolist()  # time at risk of entries that no longer wait
        self._waiting: OrderedDict[BlockHash, int] = OrderedDict()  # -> its place in the two arrays below
        self._last_used = array("d", bytes(8 * NUM_TRACKED))  # arrays: read one by one, and all at once by numpy
        self._uses_so_far = array("q", [FREE_PLACE]) * NUM_TRACKED
        self._free = list(range(NUM_TRACKED))
        self._updated = 0.0  # turnover
        self.earnings: list[list[float]] = []  # Gittins indices, in uses an arena of new data
        self.update(0.0)

    def add(self, block_hash: BlockHash, uses: int, last_used: float) -> BlockHash | None:
        """Wait for the next use of an entry that was used `uses` times. A full table first ends its oldest wait.

        Returns the entry whose wait ended, or None.
        """
        oldest = None
        if len(self._waiting) == NUM_TRACKED:
            oldest = next(iter(self._waiting))
            self.end(oldest, last_used)
        self._waiting[block_hash] = place = self._free.pop()
        self._last_used[place], self._uses_so_far[place] = last_used, min(uses, MOST_USES)
        return oldest

    def discard(self, block_hash: BlockHash) -> None:
        """Stop waiting for an entry's use, as if it had never been at risk."""
        place = self._waiting.pop(block_hash)
        self._uses_so_far[place] = FREE_PLACE
        self._free.append(place)

    def end(self, block_hash: BlockHash, now: float) -> tuple[float, int]:
        """Stop waiting for an entry that was not used until `now`, and count its time at risk.

        Returns its age, in arenas, and its uses so far. KeyError if it was not awaited.
        """
        place = self._waiting[block_hash]
        last_used, uses = self._last_used[place], self._uses_so_far[place]
        self.discard(block_hash)
        age = max(now - last_used, 0.0)
        time = self._time[uses]
        for index in range(age_bin(age) + 1):
            time[index] += min(max(age - EDGES[index], 0.0), EDGES[index + 1] - EDGES[index])
        return age, uses

    def use(self, block_hash: BlockHash, now: float) -> int:
        """Count a use of an awaited entry, and stop waiting. Returns its uses before."""
        age, uses = self.end(block_hash, now)
        self._uses[uses][age_bin(age)] += 1
        return uses

    def update(self, now: float) -> None:
        """Compute `earnings` again. Earlier observations lose weight by their age.

        There are too few observations for each pair of uses so far and age. A hazard is the product of a factor of the
        uses and a factor of the age.
        """
        weight = 0.5 ** ((now - self._updated) / HALF_FORGOTTEN)
        self._updated = now
        seen_uses, seen_time = np.asarray(self._uses) * weight, np.asarray(self._time) * weight
        self._uses, self._time = seen_uses.tolist(), seen_time.tolist()
        uses = seen_uses + self._assumed_uses
        time = seen_time + self._assumed_time + self._time_of_waiting(now)
        by_age = uses.sum(axis=0) / time.sum(axis=0)
        by_uses = uses.sum(axis=1) / (time @ by_age)
        self.earnings = gittins_indices(by_uses[:, None] * by_age)

    def _time_of_waiting(self, now: float) -> FloatArray:
        """Return the time at risk of the waiting entries, computed by bins because there are thousands."""
        uses = np.frombuffer(self._uses_so_far, np.int64)
        waiting = uses != FREE_PLACE
        ages = np.maximum(now - np.frombuffer(self._last_used)[waiting], 0.0)
        bins = np.searchsorted(EDGES[1:-1], ages, side="right")
        shape = MOST_USES + 1, NUM_BINS
        places, size = uses[waiting] * NUM_BINS + bins, (MOST_USES + 1) * NUM_BINS
        reached = np.bincount(places, minlength=size).reshape(shape)
        within = np.bincount(places, np.minimum(ages - _LOW[bins], _WIDTH[bins]), size).reshape(shape)
        passed = np.cumsum(reached[:, ::-1], axis=1)[:, ::-1] - reached
        return within + passed * _WIDTH


def gittins_indices(hazard: FloatArray) -> list[list[float]]:
    """Return the index of each class at the start of each bin. `hazard[classes, NUM_BINS]` is constant in a bin."""
    at_end = np.cumsum(hazard * _WIDTH, axis=1)  # `H` at the end of each bin
    at_start = at_end - hazard * _WIDTH
    used = np.exp(-at_start) - np.exp(-at_end)  # the chance of a use in the bin
    held = used / hazard  # the integral of the survival over the bin
    best = np.empty_like(hazard)
    for start in range(NUM_BINS):
        ratio = np.cumsum(used[:, start:], axis=1) / np.cumsum(held[:, start:], axis=1)
        best[:, start] = ratio.max(axis=1)
    found: list[list[float]] = best.tolist()
    return found


class HazardModel:
    """The value of keeping entries: expected uses per arena of new data that they are held."""

    def __init__(self, priors: Mapping[Kind, Prior]) -> None:
        self._hazards = {kind: KindHazards(prior) for kind, prior in priors.items()}
        self._kinds: dict[BlockHash, Kind] = {}
        self._updated = 0.0  # turnover
        self._next_update = deque(priors)

    def track(self, block_hash: BlockHash, reuse_class: ReuseClass, last_used: float) -> None:
        """Wait for the next use of an entry of that class, last in use at `last_used`. An earlier wait ends."""
        before = self._kinds.get(block_hash)
        if before is not None:
            self._hazards[before].end(block_hash, last_used)
        self._kinds[block_hash] = reuse_class.kind
        gone = self._hazards[reuse_class.kind].add(block_hash, reuse_class.uses, last_used)
        if gone is not None:
            del self._kinds[gone]

    def forget(self, block_hash: BlockHash) -> None:
        """Stop waiting for an entry that nobody would have used, as if it had never been there."""
        kind = self._kinds.pop(block_hash, None)
        if kind is not None:
            self._hazards[kind].discard(block_hash)

    def use(self, block_hash: BlockHash, now: float) -> ReuseClass | None:
        """Count a use of an entry, cached or evicted, and stop waiting.

        Returns its class before; None if its use was not awaited.
        """
        kind = self._kinds.pop(block_hash, None)
        return None if kind is None else ReuseClass(kind, self._hazards[kind].use(block_hash, now))

    def waits_for(self, block_hash: BlockHash) -> bool:
        """Return whether the use of an entry at this block, cached or evicted, is awaited."""
        return block_hash in self._kinds

    def advance(self, now: float) -> None:
        """Update the hazards of one kind, the kinds in turn, if the last update is long enough ago."""
        if now - self._updated >= UPDATE_EVERY / len(self._hazards):
            self._hazards[self._next_update[0]].update(now)
            self._next_update.rotate(-1)
            self._updated = now

    def earnings(self, reuse_class: ReuseClass, age: float) -> float:
        """Return the Gittins index of an entry of that class and age."""
        return self._hazards[reuse_class.kind].earnings[min(reuse_class.uses, MOST_USES)][age_bin(age)]

    def clear(self) -> None:
        """Forget the awaited uses. The learnt hazards stay."""
        for block_hash in list(self._kinds):
            self.forget(block_hash)


def age_bin(age: float) -> int:
    """Return the index of an age's bin. The last bin has no end."""
    return min(bisect_right(EDGES, age + ROUNDING), NUM_BINS) - 1


def next_edge(age: float) -> float:
    """Return the age at which an entry of that age moves to the next bin; inf in the last one."""
    bin_after = age_bin(age) + 1
    return EDGES[bin_after] if bin_after < NUM_BINS else float("inf")
