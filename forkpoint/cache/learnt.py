"""The default eviction policy: evict what is worth least per byte and per time that it is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from forkpoint.cache.eviction import EntryFacts, EvictionPolicy
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.hazards import EDGES, MOST_USES, NUM_BINS, EndKind, HazardModel, Kind, Prior, ReuseClass, next_edge
from forkpoint.cache.tree import OF_CONVERSATION, OF_LAST_TURN, TURN_ENDS, Checkpoint, Origin

EXPECTED_FACTOR: Final = 1e6  # on the key of an entry that a waiting request would resume from: it goes last
NEAR_END_SHARE: Final = 0.04  # share of returning conversations that part just before their end, on held-out traces
LOST_SHARE_START: Final = 0.55  # a guess: enough for a large first prompt to keep a state inside
LOST_SHARE_STEP: Final = 0.1  # weight of the newest return in the running share; the first ones weigh more
LEAST_LOST_BLOCKS: Final = 4  # a conversation that lost fewer blocks counts as not lost
CONVERSATION_ENDS: Final = (Origin.DECODE, EndKind.TOOL_CALL)


def _priors() -> dict[Kind, Prior]:
    uses, low, width = np.arange(MOST_USES + 1.0), np.asarray(EDGES[:-1]), np.diff(np.asarray(EDGES))
    # An even rate below one arena: other conversations run between two uses of one, and in a small arena each of them
    # takes a good part of it. Above one arena all scales of time are equally likely.
    ages = np.where(low < 1, width * (low < 1).mean(), 1 / NUM_BINS).astype(np.float64)
    at_once = 0.4 ** np.arange(float(NUM_BINS))  # tools answer sooner than people do
    # Chances of a first use. Each use halves the chance that there is no further one.
    first_chances: dict[Kind, float] = {
        Origin.PROMPT_END: 0.1,
        EndKind.SUPERSEDED: 0.05,
        Origin.JUNCTION: 0.6,
        Origin.BREAKPOINT: 0.4,
        Origin.INTERVAL: 0.02,
    }
    going_on = (1 + uses) / (4 + uses)  # three in four conversations end after their first turn, then fewer and fewer
    return {
        Origin.DECODE: Prior(going_on, ages),
        EndKind.TOOL_CALL: Prior(np.full(MOST_USES + 1, 0.95), at_once / float(at_once.sum())),
        Origin.BLOCK: Prior(going_on, np.full(NUM_BINS, 1 / NUM_BINS)),
        **{kind: Prior(1 - (1 - first) * 0.5**uses, ages) for kind, first in first_chances.items()},
    }


PRIORS: Final[Mapping[Kind, Prior]] = MappingProxyType(_priors())


class ConversationTurn(NamedTuple):
    """The policy's note of a checkpoint: the latest turn of its conversation."""

    number: int = 0  # how often the conversation was continued before
    awaits_tool: bool = False  # the answer ended in a tool call, so that nobody reads it first
    stands_in_for: ReuseClass | None = None  # the class of an evicted end; the conversation now continues from here
    fallback_below: bool = False  # this fallback has another one below it in its conversation

    @property
    def end(self) -> ReuseClass:
        """The class of the conversation's end."""
        return ReuseClass(EndKind.TOOL_CALL if self.awaits_tool else Origin.DECODE, self.number)


class LostShare:
    """The share of conversations that found their end evicted, among those that came back lately."""

    def __init__(self) -> None:
        self.value = LOST_SHARE_START
        self._num_noted = 0

    def note(self, lost: bool) -> None:
        self._num_noted += 1
        self.value += max(LOST_SHARE_STEP, 1 / (1 + self._num_noted)) * (lost - self.value)


class LearntPolicy(EvictionPolicy):
    """The key of an entry is its value:

        value = G(kind, uses, age) * cost / bytes

    `G` is the Gittins index over the learnt hazards of its kind and uses (`cache/hazards.py`). It is the expected
    number of uses for each arena of new data during which the entry is held, if it is evicted at the best age. `cost`
    is what a hit spares. `bytes` is what evicting the entry frees.

    A conversation is continued from its last checkpoint, its end, whose uses are the conversation's turns. If the end
    is evicted, the checkpoint before it stands in for it. Two kinds of checkpoint have a share of the end's value: one
    boundary before the end, because some returns part there, and a fallback, which serves if the end was evicted.
    """

    def __init__(self) -> None:
        self.hazards = HazardModel(PRIORS)
        self.lost = LostShare()

    def key(self, entry: EntryFacts) -> float:
        num_bytes = float(entry.num_bytes)
        if entry.has_children and entry.origin is Origin.FALLBACK:
            # Once everything below it is gone, it alone holds its keys and values.
            num_bytes += self._share_lost_below(entry) * entry.kv_bytes
        value = self.earnings(entry) * entry.cost / max(num_bytes, 1.0)
        return value * EXPECTED_FACTOR if entry.num_expected else value

    def next_change(self, age: float) -> float:
        return next_edge(age)

    def earnings(self, entry: EntryFacts) -> float:
        """Return the expected uses per arena of new data that the entry is held."""
        turn = _turn(entry.note)
        own = reuse_class(entry.origin, turn, entry.uses, has_children=entry.has_children, superseded=entry.superseded)
        if own.kind is Origin.NEAR_END:
            earnings = NEAR_END_SHARE * self.hazards.earnings(turn.end, entry.age)
        else:
            earnings = self._share_served(entry) * self.hazards.earnings(own, entry.age)
        if turn.stands_in_for is not None and entry.origin is not Origin.FALLBACK:
            share = 1 - self.lost.value if entry.above_origin is Origin.FALLBACK else 1.0
            earnings = max(earnings, share * self.hazards.earnings(turn.stands_in_for, entry.age))
        return earnings

    # --- what happens

    def resumed(self, checkpoint: Checkpoint, request_note: object) -> object:
        turn = _turn(checkpoint.note)
        # A return to a checkpoint that only stands in for an evicted end is counted by `missed`.
        if turn.stands_in_for is None or class_of(checkpoint).kind in CONVERSATION_ENDS:
            self._note_return(self.hazards.use(checkpoint.node.hash, checkpoint.last_used), lost=False)
        checkpoint.note = turn._replace(stands_in_for=None)
        self._track(checkpoint)
        goes_on = checkpoint.origin in OF_CONVERSATION or checkpoint.origin is Origin.NEAR_END
        number = _turn_number(request_note)
        if goes_on:
            number = max(turn.number + 1, number)
        return number

    def missed(self, blocks: Sequence[BlockHash], request_note: object, now: float) -> tuple[object, BlockHash | None]:
        self.hazards.advance(now)
        index = next((i for i in reversed(range(len(blocks))) if self.hazards.waits_for(blocks[i])), None)
        if index is None:
            return request_note, None
        used = self._note_return(self.hazards.use(blocks[index], now), lost=index >= LEAST_LOST_BLOCKS)
        if used is None:
            return request_note, None
        return max(used.uses + 1, _turn_number(request_note)), blocks[index]

    def saved(self, checkpoint: Checkpoint, above: Checkpoint | None, request_note: object) -> None:
        checkpoint.note = ConversationTurn(_turn_number(request_note))
        self._track(checkpoint)
        if above is not None and checkpoint.origin is above.origin is Origin.FALLBACK:
            above.note = _turn(above.note)._replace(fallback_below=True)

    def skipped(self, block_hash: BlockHash, request_note: object, now: float) -> None:
        self.hazards.track(block_hash, ReuseClass(Origin.DECODE, _turn_number(request_note)), now)

    def request_ended(self, checkpoint: Checkpoint, request_note: object, *, awaits_tool: bool) -> None:
        turn = _turn(checkpoint.note)
        if not checkpoint.superseded or checkpoint.origin not in OF_LAST_TURN:
            number = max(turn.number, _turn_number(request_note))
            checkpoint.note = turn._replace(number=number, awaits_tool=awaits_tool)
        self._track(checkpoint)

    def superseded(self, checkpoint: Checkpoint) -> None:
        self._track(checkpoint)

    def evicted(self, checkpoint: Checkpoint, above: Checkpoint | None) -> bool:
        own, awaited = class_of(checkpoint), _turn(checkpoint.note).stands_in_for
        if own.kind in CONVERSATION_ENDS and (checkpoint.origin is not Origin.FALLBACK or not checkpoint.node.children):
            awaited = own
        if above is None or awaited is None:
            return False
        above.note = _turn(above.note)._replace(stands_in_for=awaited)
        return True

    def copied(self, source: Checkpoint, copy: Checkpoint) -> None:
        super().copied(source, copy)
        self._track(copy)

    def dropped(self, checkpoint: Checkpoint) -> None:
        self.hazards.forget(checkpoint.node.hash)

    def reset(self) -> None:
        self.hazards.clear()

    def _note_return(self, used: ReuseClass | None, lost: bool) -> ReuseClass | None:
        """Count a conversation's return. `lost` says whether its end was gone.

        Returns `used`, or None if conversations do not continue from checkpoints of that class.
        """
        if used is None or used.kind not in (*CONVERSATION_ENDS, Origin.PROMPT_END):
            return None
        self.lost.note(lost)
        return used

    def _share_lost_below(self, entry: EntryFacts) -> float:
        """Return the share of its conversation's returns that find everything below this fallback evicted."""
        return self.lost.value**2 if _turn(entry.note).fallback_below else self.lost.value

    def _share_served(self, entry: EntryFacts) -> float:
        """Return the share of its conversation's returns that a checkpoint serves.

        A fallback serves only returns that lost everything below it. If there is a fallback above, the entry serves
        only the returns that the fallback does not.
        """
        if entry.origin not in OF_CONVERSATION:
            return 1.0
        share = 1.0
        if entry.has_children and entry.origin is Origin.FALLBACK:
            share = self._share_lost_below(entry)
        if entry.above_origin is Origin.FALLBACK:
            share *= 1 - self.lost.value
        return share

    def _track(self, checkpoint: Checkpoint) -> None:
        own = class_of(checkpoint)
        if checkpoint.origin is Origin.FALLBACK or own.kind is Origin.NEAR_END:
            return  # it is used when the conversation comes back, and the conversation's end is tracked for that
        self.hazards.track(checkpoint.node.hash, own, checkpoint.last_used)


def reuse_class(
    origin: Origin, turn: ConversationTurn, uses: int, *, has_children: bool, superseded: bool
) -> ReuseClass:
    """Return the class whose hazards an entry follows. The last arguments are as in EntryFacts.

    The checkpoint that a conversation continues from counts the conversation's turns as its uses. The end of an earlier
    turn is hardly used, unless several conversations part there.
    """
    if origin is Origin.FALLBACK or (origin in TURN_ENDS and not has_children):
        return turn.end
    if origin in TURN_ENDS and not superseded:
        return ReuseClass(Origin.PROMPT_END, turn.number)
    if superseded and origin in OF_LAST_TURN:
        branches = uses >= 2 and origin is not Origin.NEAR_END
        return ReuseClass(Origin.JUNCTION, uses) if branches else ReuseClass(EndKind.SUPERSEDED)
    return ReuseClass(origin, uses)


def class_of(checkpoint: Checkpoint) -> ReuseClass:
    """Return the class of a checkpoint as it is now."""
    has_children, superseded = bool(checkpoint.node.children), checkpoint.superseded
    return reuse_class(
        checkpoint.origin, _turn(checkpoint.note), checkpoint.num_hits, has_children=has_children, superseded=superseded
    )


def _turn(note: object) -> ConversationTurn:
    """Return a checkpoint's note. A candidate, which has its request's note, counts as a first turn.

    Counting the request's turns instead lost 0.4 and 1.0 points of hits in two of six traces and won 0.6 in one.
    """
    return note if isinstance(note, ConversationTurn) else ConversationTurn()


def _turn_number(request_note: object) -> int:
    """Return a request's note, the number of its turn in its conversation; 0 before the note is set."""
    return request_note if isinstance(request_note, int) else 0
