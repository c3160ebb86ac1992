"""How likely a checkpoint is to be used again, and how soon: learnt from all of them, by kind, uses so far and age.

Time is counted in new data, in arenas. Each kind of checkpoint has a rate of reuse by age: uses over time at risk,
those that gave way and were asked for again included, since the rates could otherwise never exceed what the arena
happens to hold. A factor by the number of uses so far multiplies it, and for the ends of conversations one by the size
of the last turn. From these follows what it earns to keep an entry: the most uses for the time held, over all ages at
which it could be given up. Where reuse is due later than at once, as with people who read an answer before they go on,
an entry that has waited is worth more than a new one.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.cache.hashing import BlockHash

FloatArray: TypeAlias = npt.NDArray[np.float64]

EDGES: Final = (0.0, *(2.0**power for power in range(-4, 5)))  # ages, in arenas; bin k is [EDGES[k], EDGES[k + 1])
NUM_BINS: Final = len(EDGES) - 1
ROUNDING: Final = 1e-6  # an age this close to an edge is beyond it
MOST_USES: Final = 5  # entries of so many uses, and of more, are one class
SIZES: Final = (64, 256, 1024, 4096, 16384, 65536)  # turns that add so many new tokens are classes of their own
NUM_SIZES: Final = len(SIZES) + 1
NUM_TRACKED: Final = 4096  # entries of a kind whose next use is waited for
PRIOR_SIZE_USES: Final = 2.0  # sizes are taken to make no difference until about so many uses were seen
PRIOR_ENTRIES: Final = 8.0  # what is assumed beforehand counts as much as so many entries
UPDATE_EVERY: Final = 1 / 8  # arenas
HALF_FORGOTTEN: Final = 64.0  # what was seen so many arenas ago counts half
TOOL_DECAY: Final = 0.4  # of the answers of tools, each bin has so much of what the one before has
PRIOR_RETURNS: Final = 50.0  # what is assumed of those that part near the end counts as much as so many returns
LOST_SHARE_START: Final = 0.6  # not known; enough for a large first prompt to keep a state inside
LOST_SHARE_STEP: Final = 0.1  # one return moves the share by so much, the first ones by more

_LOW: Final = np.asarray(EDGES[:-1])
_WIDTH: Final = np.diff(np.asarray(EDGES))
# The share of the uses assumed in each bin. Below one arena at an even rate: between two uses of a conversation others
# run, and in little room each of them is a good part of the arena. Beyond, any scale of time is as likely as another.
_ASSUMED_AGES: Final = np.where(_LOW < 1, _WIDTH * (_LOW < 1).mean(), 1 / NUM_BINS)


@enum.unique
class ReuseKind(enum.Enum):
    """Checkpoints that are used alike."""

    CONVERSATION = "conversation"  # the last one of a conversation, which goes on from there
    TOOL_CALL = "tool_call"  # the same where the answer ends in a tool call: nobody reads it first
    PROMPT = "prompt"  # the end of a prompt whose output is kept too
    SUPERSEDED = "superseded"  # the end of an earlier turn
    JUNCTION = "junction"
    DECLARED = "declared"
    NEAR_END = "near_end"
    SPARSE = "sparse"
    PERIODIC = "periodic"
    BLOCK = "block"  # keys and values alone, of models without states: nobody tracks them, what is assumed holds

    __hash__ = object.__hash__  # as Origin

    def assumed_chance(self, num_uses: int) -> float:
        """The chance of one more use, as assumed before anything was seen."""
        match self:
            case ReuseKind.CONVERSATION | ReuseKind.BLOCK:
                return (1 + num_uses) / (4 + num_uses)  # three in four end after their first turn, then fewer and fewer
            case ReuseKind.TOOL_CALL:
                return 0.95
            case ReuseKind.PROMPT:
                first = 0.1
            case ReuseKind.SUPERSEDED:
                first = 0.05
            case ReuseKind.JUNCTION:
                first = 0.6
            case ReuseKind.DECLARED:
                first = 0.4
            case ReuseKind.NEAR_END:
                first = 0.04  # of the times that its conversation comes back
            case ReuseKind.SPARSE | ReuseKind.PERIODIC:
                first = 0.02
        return 1 - (1 - first) * 0.5**num_uses

    @property
    def assumed_ages(self) -> FloatArray:
        """The share of the uses in each bin, as assumed beforehand."""
        match self:
            case ReuseKind.BLOCK:
                return np.full(NUM_BINS, 1 / NUM_BINS)
            case ReuseKind.TOOL_CALL:  # tools answer at once, on the scale of people
                shares = np.asarray([TOOL_DECAY**index for index in range(NUM_BINS)])
                return shares / float(shares.sum())
            case _:
                return _ASSUMED_AGES


CONVERSATION_ENDS: Final = (ReuseKind.CONVERSATION, ReuseKind.TOOL_CALL)


class Turn(NamedTuple):
    """A conversation's latest turn: how often the conversation had been continued before, what the prompt added to its
    history, and whether the answer ended in a tool call."""

    number: int = 0
    num_new_tokens: int = 0
    awaits_tool: bool = False


FIRST_TURN: Final = Turn()


class ReuseClass(NamedTuple):
    """Checkpoints that are used alike: of one kind, used as often so far. For the end of a conversation: the number
    and the size of its latest turn."""

    kind: ReuseKind
    num_uses: int = 0
    size: int = 0

    @property
    def number(self) -> int:
        """Of this class, among those of its kind."""
        return min(self.num_uses, MOST_USES) * NUM_SIZES + self.size

    @classmethod
    def of_turn(cls, kind: ReuseKind, turn: Turn) -> ReuseClass:
        """Where a tool answers next, the size of what was asked before tells nothing."""
        size = 0 if kind is ReuseKind.TOOL_CALL else bisect_right(SIZES, turn.num_new_tokens)
        return cls(kind, turn.number, size)

    @classmethod
    def of_conversation(cls, turn: Turn) -> ReuseClass:
        """Of the end of a conversation whose latest turn is `turn`."""
        return cls.of_turn(ReuseKind.TOOL_CALL if turn.awaits_tool else ReuseKind.CONVERSATION, turn)


class KindRates:
    """One kind: entries that wait for their next use, what was seen of others, and what follows.

    Arrays are `[classes, NUM_BINS]`, with one class for each number of uses so far and each size of turns.
    """

    def __init__(self, kind: ReuseKind) -> None:
        chances = np.asarray([[kind.assumed_chance(uses)] for uses in range(MOST_USES + 1)])
        in_bin = chances * kind.assumed_ages
        unused = 1 - np.cumsum(in_bin, axis=1) + in_bin / 2
        self._assumed_uses: FloatArray = PRIOR_ENTRIES * in_bin
        self._assumed_time: FloatArray = PRIOR_ENTRIES * unused * _WIDTH
        num_classes = len(in_bin) * NUM_SIZES
        self._uses = [[0.0] * NUM_BINS for _ in range(num_classes)]  # lists: single entries are added all the time
        self._time = [[0.0] * NUM_BINS for _ in range(num_classes)]  # at risk, of entries that no longer wait
        self._waiting: OrderedDict[BlockHash, int] = OrderedDict()  # -> place in the arrays below
        self._free: list[int] = []
        self._last_used: FloatArray = np.full(0, np.inf)  # of entries that wait; infinite where there is none
        self._class = np.zeros(0, np.int64)
        self._seen = 0.0
        self.earnings: list[list[float]] = []
        self.update(0.0)

    def add(self, block_hash: BlockHash, reuse_class: ReuseClass, last_used: float) -> BlockHash | None:
        """Wait for the next use of an entry; returns one that is no longer waited for."""
        oldest = None
        if len(self._waiting) == NUM_TRACKED:
            oldest = next(iter(self._waiting))
            self.end(oldest, last_used)
        if not self._free:
            size = len(self._class)
            self._free.extend(range(size, 2 * size or 64))
            self._last_used = np.append(self._last_used, np.full(len(self._free), np.inf))
            self._class = np.append(self._class, np.zeros(len(self._free), np.int64))
        place = self._waiting[block_hash] = self._free.pop()
        self._last_used[place], self._class[place] = last_used, reuse_class.number
        return oldest

    def discard(self, block_hash: BlockHash) -> tuple[float, int]:
        """An entry no longer waits; returns when it was last used, and its class."""
        place = self._waiting.pop(block_hash)
        self._free.append(place)
        last_used = float(self._last_used[place])
        self._last_used[place] = np.inf
        return last_used, int(self._class[place])

    def end(self, block_hash: BlockHash, now: float) -> tuple[float, int]:
        """As `discard`, of an entry that was not used until `now`: that counts."""
        last_used, index_of_class = self.discard(block_hash)
        time = self._time[index_of_class]
        for index in range(age_bin(max(now - last_used, 0.0)) + 1):
            time[index] += min(max(now - last_used - EDGES[index], 0.0), EDGES[index + 1] - EDGES[index])
        return last_used, index_of_class

    @property
    def num_uses(self) -> float:
        """Uses that were seen, lately ones above all."""
        return sum(map(sum, self._uses))

    def use(self, block_hash: BlockHash, now: float) -> int:
        """An entry is asked for; returns how often it was before."""
        last_used, index_of_class = self.end(block_hash, now)
        self._uses[index_of_class][age_bin(now - last_used)] += 1
        return index_of_class // NUM_SIZES

    def update(self, now: float) -> None:
        """Work out `earnings` anew; what was seen before loses weight by its age."""
        kept = 0.5 ** ((now - self._seen) / HALF_FORGOTTEN)
        self._seen = now
        seen_uses, seen_time = np.asarray(self._uses) * kept, np.asarray(self._time) * kept
        self._uses, self._time = seen_uses.tolist(), seen_time.tolist()
        seen_time += self._time_of_waiting(now, len(seen_time))
        shape = MOST_USES + 1, NUM_SIZES, NUM_BINS
        uses, time = seen_uses.reshape(shape), seen_time.reshape(shape)
        all_uses, all_time = uses.sum(axis=1) + self._assumed_uses, time.sum(axis=1) + self._assumed_time
        by_age = all_uses.sum(axis=0) / all_time.sum(axis=0)
        by_number = all_uses.sum(axis=1) / (all_time @ by_age)
        expected_uses = time @ by_age * by_number[:, None]
        by_size = (uses.sum(axis=2) + PRIOR_SIZE_USES) / (expected_uses + PRIOR_SIZE_USES)
        rate = ((by_number[:, None] * by_size)[..., None] * by_age).reshape(-1, NUM_BINS)
        expected = np.cumsum(rate * _WIDTH, axis=1)
        used = np.exp(rate * _WIDTH - expected) - np.exp(-expected)  # the chance of use in each bin
        held = used / rate
        self.earnings = _best_from_each(used, held)

    def _time_of_waiting(self, now: float, num_classes: int) -> FloatArray:
        """Time at risk, `[classes, NUM_BINS]`, of the entries that wait: counted by the bin that each has reached."""
        waiting = self._last_used < now  # where there is no entry it is infinite
        ages = now - self._last_used[waiting]
        bins = np.minimum(np.searchsorted(EDGES[1:], ages, side="right"), NUM_BINS - 1)
        places, size = self._class[waiting] * NUM_BINS + bins, num_classes * NUM_BINS
        reached = np.bincount(places, minlength=size).reshape(num_classes, NUM_BINS)
        within = np.bincount(places, np.minimum(ages - _LOW[bins], _WIDTH[bins]), size).reshape(num_classes, NUM_BINS)
        passed = np.cumsum(reached[:, ::-1], axis=1)[:, ::-1] - reached
        return within + passed * _WIDTH


class LostShare:
    """The share of what was looked for that had given way, lately."""

    def __init__(self) -> None:
        self.value = LOST_SHARE_START
        self._num_noted = 0

    def note(self, lost: bool) -> None:
        self._num_noted += 1
        self.value += max(LOST_SHARE_STEP, 1 / (1 + self._num_noted)) * (lost - self.value)


class ReuseModel:
    """What it earns to keep checkpoints, in uses for every arena of new data that they are held for."""

    def __init__(self) -> None:
        self._rates = {kind: KindRates(kind) for kind in ReuseKind}
        self._kinds: dict[BlockHash, ReuseKind] = {}
        self._updated = 0.0
        self._next_update = deque(ReuseKind)
        self._deep: OrderedDict[BlockHash, None] = OrderedDict()  # fallbacks below others, there or gone
        self.near_end_share = 0.0  # of the conversations that came back, those that parted just before their end
        self._update_near_end_share()
        self.lost_ends = LostShare()  # of the conversations that came back, those whose end was gone
        self.lost_fallbacks = LostShare()  # of those that had several fallbacks, the ones whose deepest was gone too

    def track(self, block_hash: BlockHash, reuse_class: ReuseClass, last_used: float) -> None:
        """A checkpoint is there; it, or its conversation, was in use at `last_used`."""
        before = self._kinds.get(block_hash)
        if before is not None:
            self._rates[before].end(block_hash, last_used)
        self._kinds[block_hash] = reuse_class.kind
        gone = self._rates[reuse_class.kind].add(block_hash, reuse_class, last_used)
        if gone is not None:
            del self._kinds[gone]

    def forget(self, block_hash: BlockHash) -> None:
        """The checkpoint is gone, and nobody would have used it."""
        kind = self._kinds.pop(block_hash, None)
        if kind is not None:
            self._rates[kind].discard(block_hash)

    def use(self, block_hash: BlockHash, now: float, lost: bool) -> int | None:
        """A checkpoint at this block is asked for, `lost` if it had given way.

        Returns how many turns its conversation has had if it was the end of one, None otherwise.
        """
        kind = self._kinds.pop(block_hash, None)
        if kind is None:
            return None
        num_uses = self._rates[kind].use(block_hash, now)
        if kind not in (*CONVERSATION_ENDS, ReuseKind.PROMPT):
            return None
        self.lost_ends.note(lost)
        return num_uses + 1

    def track_fallback(self, block_hash: BlockHash) -> None:
        """There is a fallback below another one of its conversation."""
        self._deep[block_hash] = None
        if len(self._deep) > NUM_TRACKED:
            self._deep.popitem(last=False)

    def use_fallback(self, hit: BlockHash | None, lost: Sequence[BlockHash]) -> None:
        """A conversation that had lost its end goes on from `hit`; `lost` are the blocks after that."""
        if hit in self._deep:
            self.lost_fallbacks.note(False)
        elif gone := [block_hash for block_hash in lost if block_hash in self._deep]:
            self.lost_fallbacks.note(True)
            for block_hash in gone:
                del self._deep[block_hash]

    def waits_for(self, block_hash: BlockHash) -> bool:
        """Whether there is, or was, a checkpoint at this block that would have been used."""
        return block_hash in self._kinds

    def advance(self, now: float) -> None:
        """Take in what was seen, every now and then, one kind at a time."""
        if now - self._updated < UPDATE_EVERY / len(self._rates):
            return
        kind = self._next_update.popleft()
        self._next_update.append(kind)
        self._rates[kind].update(now)
        self._update_near_end_share()
        self._updated = now

    def _update_near_end_share(self) -> None:
        kind = ReuseKind.NEAR_END
        parted = self._rates[kind].num_uses
        returns = parted + sum(self._rates[end].num_uses for end in CONVERSATION_ENDS)
        self.near_end_share = (parted + PRIOR_RETURNS * kind.assumed_chance(0)) / (returns + PRIOR_RETURNS)

    def earnings(self, reuse_class: ReuseClass, age: float) -> float:
        """Uses to expect for every arena of new data that an entry is held for, if it is given up at the best age."""
        return self._rates[reuse_class.kind].earnings[reuse_class.number][age_bin(age)]

    def clear(self) -> None:
        """Forget what is waited for; what was learnt stays."""
        for block_hash in list(self._kinds):
            self.forget(block_hash)
        self._deep.clear()


def age_bin(age: float) -> int:
    return min(bisect_right(EDGES, age + ROUNDING), NUM_BINS) - 1


def next_edge(age: float) -> float:
    """The age at which an entry of that age changes its bin."""
    bin_after = age_bin(age) + 1
    return EDGES[bin_after] if bin_after < NUM_BINS else float("inf")


def _best_from_each(used: FloatArray, held: FloatArray) -> list[list[float]]:
    """Of each class and from each bin on: the most uses for the time held, over the bins to give an entry up after."""
    best = np.full(used.shape, -np.inf)
    for start in range(NUM_BINS):
        ratio = np.cumsum(used[:, start:], axis=1) / np.cumsum(held[:, start:], axis=1)
        best[:, start] = ratio.max(axis=1)
    found: list[list[float]] = best.tolist()
    return found
