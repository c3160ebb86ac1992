"""What requests hold of the arena, and whether it has room for more of them."""

from __future__ import annotations

import itertools

from forkpoint.cache.arena import Arena
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.lease import Lease
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.tree import PrefixTree


class Holdings:
    """Counts blocks and slots that requests hold; what is merely cached is not among them, since it gives way.

    `num_slots` are those that requests write, and those of checkpoints with readers. Of the tree's blocks the pinned
    ones are held.
    """

    def __init__(self, layout: CacheLayout, arena: Arena, tree: PrefixTree) -> None:
        self._layout = layout
        self._arena = arena
        self._tree = tree
        self.num_slots = 0

    def count_slots(self, more: int) -> None:
        """So many more are held; fewer where negative."""
        self.num_slots += more

    @property
    def num_blocks(self) -> int:
        return self._arena.blocks.num_used - self._tree.num_nodes + self._tree.num_pinned if self._layout.has_kv else 0

    @property
    def num_pages(self) -> int:
        """Pages that what is held takes, densely packed."""
        return self._layout.num_pages_of(self.num_blocks, self.num_slots)

    def has_room(self, hit: PrefixHit, num_tokens: int, spare_blocks: int) -> bool:
        """Whether a request that hits `hit` could grow to `num_tokens` without preempting another one."""
        num_shared = sum(node.pins > 0 for node in hit.path)
        slots = 1 + (hit.checkpoint is not None and hit.checkpoint.num_readers == 0)
        return self._fits(num_tokens, spare_blocks - num_shared, slots)

    def may_have_room(self, lease: Lease, num_tokens: int, spare_blocks: int) -> bool:
        """False only where `has_room` would be False whatever a lookup finds: cheaper than the lookup.

        A hit spares room only by blocks that other requests hold, and those can be counted by hash."""
        nodes = (self._tree.find(block_hash) for block_hash in lease.chain.hashes)
        shared = itertools.takewhile(lambda node: node is not None and node.pins > 0, nodes)
        return self._fits(num_tokens, spare_blocks - sum(1 for _ in shared), 1)

    def _fits(self, num_tokens: int, more_blocks: int, more_slots: int) -> bool:
        blocks = self.num_blocks + self._layout.num_blocks_for(num_tokens) + more_blocks
        return self._layout.num_pages_of(blocks, self.num_slots + more_slots) < self._arena.num_pages
