"""Ghosts: hashes of lately evicted entries. They explain misses and show junctions of evicted histories."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable

from forkpoint.cache.hashing import BlockHash


@enum.unique
class GhostKind(enum.Enum):
    KV = "kv"  # the whole block is gone
    CHECKPOINT = "checkpoint"  # its checkpoint is gone; keys and values may still be there


class GhostTable:
    """A bounded table of evicted entries. It forgets the oldest first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kinds: OrderedDict[BlockHash, GhostKind] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, hashes: Iterable[BlockHash], kind: GhostKind) -> None:
        """Remember evicted entries, in this order, and forget the oldest beyond the capacity."""
        kinds = self._kinds
        for block_hash in hashes:
            if block_hash in kinds:
                kinds.move_to_end(block_hash)
            kinds[block_hash] = kind
        while len(kinds) > self._capacity:
            kinds.popitem(last=False)

    def get(self, block_hash: BlockHash) -> GhostKind | None:
        return self._kinds.get(block_hash)

    def discard(self, hashes: Iterable[BlockHash], kind: GhostKind) -> None:
        """Forget those of these hashes that are ghosts of that kind, because they are cached again."""
        for block_hash in self._kinds.keys() & hashes:
            if self._kinds[block_hash] is kind:
                del self._kinds[block_hash]

    def clear(self) -> None:
        self._kinds.clear()
