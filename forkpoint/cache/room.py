"""Room in the arena: what requests hold of it, and what fits beside that."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.lease import Lease
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.store import PrefixStore


class ArenaRoom:
    """Counts what requests hold. Cached entries that eviction can take do not count.

    The owner of the leases calls `took_slot` and `gave_slot` for every running slot.
    """

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._layout, self._arena = store.layout, store.arena
        self._num_running_slots = 0

    def took_slot(self) -> None:
        self._num_running_slots += 1

    def gave_slot(self) -> None:
        self._num_running_slots -= 1

    @property
    def num_blocks_held(self) -> int:
        """Blocks of leases, and pinned blocks of the tree, windows apart. Meaningless in a layout without blocks."""
        tree = self._store.tree
        return self._arena.blocks.num_used - tree.num_nodes + tree.num_pinned

    @property
    def num_slots_held(self) -> int:
        """Running slots, and slots of checkpoints with readers."""
        return self._num_running_slots + self._store.num_read

    @property
    def num_pages_held(self) -> int:
        """Pages that the held blocks and slots take, densely packed."""
        return self._layout.num_pages_of(self.num_blocks_held, self.num_slots_held, self._store.windows.num_busy)

    def ever_fits(self, num_tokens: int) -> bool:
        """Return whether an otherwise empty arena holds a request of `num_tokens` tokens, output included."""
        return self._layout.num_pages_for(num_tokens, 1) <= self._arena.num_pages - 1

    def fits(self, hit: PrefixHit, num_tokens: int, spare_blocks: int, spare_slots: int = 0) -> bool:
        """Return whether a request that starts from `hit` could grow to `num_tokens` without preempting another.

        `spare_blocks` and `spare_slots` are left free besides.
        """
        # The pinned nodes of a path come first: a pin reaches up to the root.
        num_shared = bisect_left(hit.path, True, key=lambda node: not node.pins)
        slots = 1 + spare_slots + (hit.checkpoint is not None and hit.checkpoint.num_readers == 0)
        num_shared_windows = [0] * len(self._layout.windows)
        if hit.checkpoint is not None:
            num_shared_windows = [sum(each.num_busy > 0 for each in run) for run in hit.checkpoint.windows]
        return self._fits(num_tokens, spare_blocks - num_shared, slots, num_shared_windows)

    def may_fit(self, lease: Lease, num_tokens: int, spare_blocks: int) -> bool:
        """Return False only if `fits` would be False whatever a lookup finds. Cheaper than the lookup.

        A hit saves room only by blocks that other requests hold, and those can be counted by hash.
        """
        num_shared = bisect_left(lease.chain.hashes, True, key=self._is_unshared)
        busy = zip(self._store.windows.num_busy, self._layout.windows, strict=True)
        most_shared = [min(count, group.most_of_state) for count, group in busy]
        return self._fits(num_tokens, spare_blocks - num_shared, 1, most_shared)

    def _is_unshared(self, block_hash: BlockHash) -> bool:
        """Return whether no request holds the block. If so, none holds a block after it in the same history."""
        node = self._store.tree.find(block_hash)
        return node is None or not node.pins

    def _fits(self, num_tokens: int, more_blocks: int, more_slots: int, num_shared_windows: Sequence[int]) -> bool:
        layout, slots = self._layout, self.num_slots_held + more_slots
        blocks = self.num_blocks_held + layout.num_blocks_for(num_tokens) + more_blocks
        busy, wanted = self._store.windows.num_busy, layout.num_window_blocks_for(num_tokens)
        windows = [a + b - c for a, b, c in zip(busy, wanted, num_shared_windows, strict=True)]
        return layout.num_pages_of(blocks, slots, windows) < self._arena.num_pages
