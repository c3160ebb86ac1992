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
        self._last_used: dict[BlockHash, float] = {}  # of those that had a turn's end

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, block_hash: BlockHash, kind: GhostKind, last_used: float | None = None) -> None:
        """Remember an evicted entry; `last_used` is the clock at the last use of a turn's end."""
        if not self._capacity:
            return
        if last_used is not None:
            self._last_used[block_hash] = last_used
        self._kinds[block_hash] = kind
        self._kinds.move_to_end(block_hash)
        if len(self._kinds) > self._capacity:
            self._last_used.pop(self._kinds.popitem(last=False)[0], None)

    def get(self, block_hash: BlockHash) -> GhostKind | None:
        return self._kinds.get(block_hash)

    def take_last_use(self, block_hash: BlockHash) -> float | None:
        """When the checkpoint there was last used, once; None if there was none, or it was asked before."""
        return self._last_used.pop(block_hash, None)

    def discard(self, block_hash: BlockHash) -> None:
        """The block, or its checkpoint, is cached again."""
        self._kinds.pop(block_hash, None)
        self._last_used.pop(block_hash, None)

    def clear(self) -> None:
        self._kinds.clear()
        self._last_used.clear()
