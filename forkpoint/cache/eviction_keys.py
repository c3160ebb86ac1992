"""Keys of entries: gathers the facts of an entry and asks the eviction policy."""

from __future__ import annotations

from typing import Final, TypeAlias

from forkpoint.cache.arena import Arena
from forkpoint.cache.eviction import EntryFacts, EvictionPolicy, RecomputeCost
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.lease import StateSave
from forkpoint.cache.policy_answers import checked_key, checked_next_change
from forkpoint.cache.tree import INSIDE_PROMPTS, Checkpoint, Entry, Origin, nearest_checkpoint
from forkpoint.config import BLOCK_SIZE

# Origins of candidates after which the same prompt goes on.
PROMPT_GOES_ON: Final = (*INSIDE_PROMPTS, Origin.INTERVAL, Origin.NEAR_END)
Above: TypeAlias = Checkpoint | StateSave  # the nearest earlier state of the same history


class EvictionKeys:
    """Computes the keys of the entries of one room and of candidates. Changes nothing."""

    def __init__(self, layout: CacheLayout, arena: Arena, policy: EvictionPolicy, cost: RecomputeCost) -> None:
        self._arena, self._policy, self._cost = arena, policy, cost
        self._block_bytes, self._checkpoint_bytes = layout.block_bytes, layout.checkpoint_bytes

    def of(self, entry: Entry) -> float:
        """Return the key of an entry as it is now."""
        if isinstance(entry, Checkpoint):
            node = entry.node
            return self._of_checkpoint(
                entry, nearest_checkpoint(node.parent), bool(node.children), entry.last_used, entry.num_expected
            )
        facts = EntryFacts(
            origin=Origin.BLOCK,
            cost=self._cost((entry.depth - 1) * BLOCK_SIZE, entry.depth * BLOCK_SIZE),
            num_bytes=self._block_bytes,
            kv_bytes=self._block_bytes,
            last_used=entry.last_used,
            age=self._arena.turnover - entry.last_used,
            block_hash=entry.hash,
            uses=entry.num_hits,
        )
        return checked_key(self._policy, facts)

    def of_candidate(
        self, block_hash: BlockHash, num_tokens: int, origin: Origin, note: object, above: Above | None
    ) -> float:
        """Return the key that the state after `num_tokens` tokens would get as a checkpoint if it was saved now.

        `block_hash` is the hash of its block, `note` its request's note, `above` the nearest state before it.
        """
        has_children = origin in PROMPT_GOES_ON
        cost, num_bytes, kv_bytes, above_origin = self._sizes(above, num_tokens, has_children)
        facts = EntryFacts(
            origin=origin,
            cost=cost,
            num_bytes=num_bytes,
            kv_bytes=kv_bytes,
            last_used=self._arena.turnover,
            age=0.0,
            block_hash=block_hash,
            has_children=has_children,
            above_origin=above_origin,
            note=note,
        )
        return checked_key(self._policy, facts)

    def of_copy(self, source: Checkpoint, above: Checkpoint | None, has_children: bool) -> float:
        """Return the key that a copy of a checkpoint from another room would get here.

        `above` is the nearest checkpoint before it here. `has_children`: later blocks of its history are here.
        """
        return self._of_checkpoint(source, above, has_children, self._arena.turnover, 0)

    def freed_bytes(self, entry: Entry) -> int:
        """Return the bytes that the eviction of an entry frees, as long as no other entry holds them."""
        if not isinstance(entry, Checkpoint):
            return self._block_bytes
        above = nearest_checkpoint(entry.node.parent)
        _, num_bytes, _, _ = self._sizes(above, entry.num_tokens, bool(entry.node.children))
        return num_bytes

    def _of_checkpoint(
        self, checkpoint: Checkpoint, above: Checkpoint | None, has_children: bool, last_used: float, num_expected: int
    ) -> float:
        cost, num_bytes, kv_bytes, above_origin = self._sizes(above, checkpoint.num_tokens, has_children)
        facts = EntryFacts(
            origin=checkpoint.origin,
            cost=cost,
            num_bytes=num_bytes,
            kv_bytes=kv_bytes,
            last_used=last_used,
            age=self._arena.turnover - last_used,
            block_hash=checkpoint.node.hash,
            uses=checkpoint.num_hits,
            num_expected=num_expected,
            has_children=has_children,
            superseded=checkpoint.superseded,
            above_origin=above_origin,
            note=checkpoint.note,
        )
        return checked_key(self._policy, facts)

    def _sizes(self, above: Above | None, end: int, has_children: bool) -> tuple[float, int, int, Origin | None]:
        """Return cost, num_bytes, kv_bytes and above_origin (as in EntryFacts) of a state after `end` tokens."""
        start, above_origin = (0, None) if above is None else (above.num_tokens, above.origin)
        kv_bytes = (end - start) // BLOCK_SIZE * self._block_bytes
        num_bytes = self._checkpoint_bytes
        if not has_children:
            num_bytes += kv_bytes
        return self._cost(start, end), num_bytes, kv_bytes, above_origin

    def due(self, entry: Entry) -> float:
        """Return the turnover at which the entry's key may fall by itself; inf if it never does."""
        return entry.last_used + checked_next_change(self._policy, self._arena.turnover - entry.last_used)
