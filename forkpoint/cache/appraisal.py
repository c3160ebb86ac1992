"""What a cached entry, or one that is about to be, is worth: its facts, gathered for the eviction policy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from forkpoint.cache.arena import Arena
from forkpoint.cache.eviction import EntryFacts, EvictionPolicy, RecomputeCost
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.reuse import CONVERSATION_ENDS, ReuseClass, ReuseKind, ReuseModel, Turn, next_edge
from forkpoint.cache.tree import INSIDE_PROMPTS, OF_CONVERSATION, Checkpoint, Node, Origin, PrefixTree


class Above(Protocol):
    """A state before another one of the same history: a checkpoint, or a state that is about to be stored."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def origin(self) -> Origin: ...


class History(NamedTuple):
    """What tells the checkpoints of one origin apart. `inside`: blocks follow it; `fallback_above`, `fallback_below`:
    the next checkpoint before it is a fallback; it is one itself, and there is another below."""

    num_hits: int
    turn: Turn
    superseded: bool
    inside: bool
    fallback_above: bool
    fallback_below: bool


class Appraiser:
    """Turns entries into keys of the eviction queue. Changes nothing; `reuse` is kept by the store."""

    def __init__(
        self,
        layout: CacheLayout,
        arena: Arena,
        tree: PrefixTree,
        policy: EvictionPolicy,
        cost: RecomputeCost,
        reuse: ReuseModel,
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._tree = tree
        self._policy = policy
        self._cost = cost
        self._reuse = reuse

    def checkpoint_key(self, c: Checkpoint) -> float:
        """The key of a checkpoint as it is now."""
        return self._policy.key(self._facts(c))

    def candidate_key(
        self, block_hash: BlockHash, num_tokens: int, origin: Origin, turn: Turn, above: Above | None
    ) -> float:
        """The key that a checkpoint after `num_tokens` tokens would get, the last of them those of block `block_hash`,
        with `above` the nearest one before it."""
        inside = origin in (Origin.INTERVAL, Origin.NEAR_END, *INSIDE_PROMPTS)  # the prompt goes on
        history = History(0, turn, False, inside, above is not None and above.origin is Origin.FALLBACK, False)
        saved, num_bytes = self._worth(above.num_tokens if above else 0, num_tokens, self._kv_share(origin, history))
        earnings = self._earnings(origin, history, age=0.0)
        return self._policy.key(EntryFacts(origin, saved, num_bytes, self._arena.turnover, 0, 0, earnings, block_hash))

    def leaf_key(self, node: Node) -> float:
        """The key of a leaf, in a layout without states."""
        size = self._layout.block_size
        return self._policy.key(
            EntryFacts(
                origin=Origin.PROMPT_END,
                saved=self._cost((node.depth - 1) * size, node.depth * size),
                num_bytes=self._layout.block_bytes,
                last_used=node.last_used,
                num_hits=node.num_hits,
                num_expected=0,
                earnings=self._reuse.earnings(
                    ReuseClass(ReuseKind.BLOCK, node.num_hits), self._arena.turnover - node.last_used
                ),
                block_hash=node.hash,
            )
        )

    def due(self, entry: Node | Checkpoint) -> float:
        """When the entry's earnings change with its age."""
        return entry.last_used + next_edge(self._arena.turnover - entry.last_used)

    def _facts(self, c: Checkpoint) -> EntryFacts:
        above = self._tree.above(c.node)
        history = _history(c, above)
        saved, num_bytes = self._worth(
            above.num_tokens if above else 0, c.num_tokens, self._kv_share(c.origin, history)
        )
        age = self._arena.turnover - c.last_used
        earnings = self._earnings(c.origin, history, age)
        if c.stands_in_for is not None and c.origin is not Origin.FALLBACK:
            share = 1 - self._reuse.lost_ends.value if history.fallback_above else 1.0
            earnings = max(earnings, self._reuse.earnings(c.stands_in_for, age) * share)
        return EntryFacts(c.origin, saved, num_bytes, c.last_used, c.num_hits, c.num_expected, earnings, c.node.hash)

    def _earnings(self, origin: Origin, history: History, age: float) -> float:
        own = _reuse_class(origin, history)
        if own.kind is ReuseKind.NEAR_END:  # of use when its conversation comes back, if that parts from what it said
            return self._reuse.near_end_share * self._reuse.earnings(ReuseClass.of_conversation(history.turn), age)
        return self._reuse.earnings(own, age) * self._share_served(origin, history)

    def _share_served(self, origin: Origin, history: History) -> float:
        """Of its conversation's returns, the share that a checkpoint serves: those for which all below it has given
        way, and, where one before it is counted on for that case, it has not."""
        if origin not in OF_CONVERSATION:
            return 1.0
        share, is_fallback = 1.0, origin is Origin.FALLBACK
        if is_fallback:
            share = self._share_lost_below(history)
        if history.fallback_above:
            share *= 1 - (self._reuse.lost_fallbacks if is_fallback else self._reuse.lost_ends).value
        return share

    def _share_lost_below(self, history: History) -> float:
        """Of a conversation's returns, the share for which all checkpoints below a fallback have given way."""
        if not history.inside:
            return 1.0
        share = self._reuse.lost_ends.value
        return share * self._reuse.lost_fallbacks.value if history.fallback_below else share

    def _kv_share(self, origin: Origin, history: History) -> float:
        """Of the keys and values between a checkpoint and the one before it, the share held on its account: none
        where what is below keeps them in any case; for a fallback those of the time after all below has given way."""
        if not history.inside:
            return 1.0
        return self._share_lost_below(history) if origin is Origin.FALLBACK else 0.0

    def _worth(self, start: int, end: int, kv_share: float) -> tuple[float, int]:
        """What a checkpoint at `end` saves if the nearest one before it is at `start`, and the bytes it takes."""
        kv_bytes = (end - start) // self._layout.block_size * self._layout.block_bytes
        num_bytes = self._layout.slot_bytes + int(kv_share * kv_bytes)
        return self._cost(start, end), num_bytes


_KINDS: Final[Mapping[Origin, ReuseKind]] = MappingProxyType(
    {
        Origin.JUNCTION: ReuseKind.JUNCTION,
        Origin.DECLARED: ReuseKind.DECLARED,
        Origin.NEAR_END: ReuseKind.NEAR_END,
        Origin.SPARSE: ReuseKind.SPARSE,
        Origin.INTERVAL: ReuseKind.PERIODIC,
    }
)


def reuse_class(c: Checkpoint) -> ReuseClass:
    """Which checkpoints this one is used like, and how often it has been so far."""
    return _reuse_class(c.origin, _history(c, None))


def awaited_at(c: Checkpoint) -> ReuseClass | None:
    """The conversation that goes on from `c`: it ends there, or its end gave way and `c` stands in for it. A fallback
    is of the class of its conversation's end, which may be there below it."""
    if c.origin is Origin.FALLBACK and c.node.children:
        return c.stands_in_for
    own = reuse_class(c)
    return own if own.kind in CONVERSATION_ENDS else c.stands_in_for


def _history(c: Checkpoint, above: Checkpoint | None) -> History:
    fallback_above = above is not None and above.origin is Origin.FALLBACK
    fallback_below = c.fallback_below is not None and not c.fallback_below.dropped
    return History(c.num_hits, c.turn, c.superseded, bool(c.node.children), fallback_above, fallback_below)


def _reuse_class(origin: Origin, history: History) -> ReuseClass:
    num_hits, turn, superseded, inside, _, _ = history
    if origin in OF_CONVERSATION:
        if not inside or origin is Origin.FALLBACK:
            return ReuseClass.of_conversation(turn)
        if not superseded:
            return ReuseClass.of_turn(ReuseKind.PROMPT, turn)
        return ReuseClass(ReuseKind.SUPERSEDED) if num_hits < 2 else ReuseClass(ReuseKind.JUNCTION, num_hits)
    if origin is Origin.NEAR_END and superseded:
        return ReuseClass(ReuseKind.SUPERSEDED)
    return ReuseClass(_KINDS[origin], num_hits)
