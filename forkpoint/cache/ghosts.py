"""What was evicted lately: enough to say why a request missed and to see a junction the second time."""

from __future__ import annotations

import enum
from collections import OrderedDict

from forkpoint.cache.hashing import BlockHash


@enum.unique
class GhostKind(enum.Enum):
    KV = "kv"  # the whole block is gone
    CHECKPOINT = "checkpoint"  # its checkpoint is gone, keys and values may still be there


class GhostTable:
    """A bounded table of evicted entries; the oldest is forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kinds: OrderedDict[BlockHash, GhostKind] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, block_hash: BlockHash, kind: GhostKind) -> None:
        """Remember an evicted entry."""
        if not self._capacity:
            return
        self._kinds[block_hash] = kind
        self._kinds.move_to_end(block_hash)
        if len(self._kinds) > self._capacity:
            self._kinds.popitem(last=False)

    def get(self, block_hash: BlockHash) -> GhostKind | None:
        return self._kinds.get(block_hash)

    def discard(self, block_hash: BlockHash) -> None:
        """The block, or its checkpoint, is cached again."""
        self._kinds.pop(block_hash, None)

    def clear(self) -> None:
        self._kinds.clear()
