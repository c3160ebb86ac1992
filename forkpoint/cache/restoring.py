"""Restoring: copies a prefix from a tier to the arena, over several plans, for a request that waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.cache.layout import NO_BLOCK
from forkpoint.cache.lease import Lease, StateSave
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.restore_source import RestoreSource
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import Checkpoint, Node
from forkpoint.config import BLOCK_SIZE

# Bytes that a plan loads. The copies run before the plan's rows and delay them: about 10 ms on a CPU.
LOADED_AT_ONCE: Final = 64 * 2**20


@dataclass(slots=True, eq=False)
class Restore:
    """The prefix of one waiting request on its way into the arena. Restoring writes it.

    `tier` holds `source`, the end of the prefix there. `node` is the deepest node that is in the arena by now; it is
    pinned. `loaded` is its checkpoint, which the restore reads so that it cannot be evicted.
    """

    lease: Lease
    order: tuple[int, int]  # of the request, as in ScheduledRequest
    tier: RestoreSource
    source: Node
    source_checkpoint: Checkpoint | None
    node: Node
    num_tokens_before: int  # that a lookup found in the arena
    loaded: Checkpoint | None = None
    is_complete: bool = False


class Restoring:
    """Loads one prefix at a time, so that requests that wait for memory never wait for each other's prefixes.

    What was loaded is filed at once: a plan's copies run before its rows. Others read `current`, and `has_loaded`:
    whether the plan under construction loads something or starts to read something.
    """

    def __init__(self, store: PrefixStore, tiers: Sequence[RestoreSource]) -> None:
        """`store` is the arena's. Of two tiers with the same prefix the first one is used."""
        self._store = store
        self._tiers = tiers
        self.current: Restore | None = None
        self.loaded_at_once = LOADED_AT_ONCE
        self.has_loaded = False
        self._left_bytes = 0

    def begin_plan(self) -> None:
        """Start to count what the next plan loads."""
        self._left_bytes, self.has_loaded = self.loaded_at_once, False

    @property
    def is_reading(self) -> bool:
        """Whether the current restore waits for its tier."""
        return self.current is not None and self.current.tier.is_reading

    def is_for(self, lease: Lease) -> bool:
        """Return whether a prefix is being restored for the request of this lease."""
        return self.current is not None and self.current.lease is lease

    def find(self, lease: Lease, num_tokens: int, hit: PrefixHit) -> tuple[RestoreSource, Node] | None:
        """Return the tier with the longest prefix and the prefix's end there; None if the arena's `hit` is as long."""
        usable, longest = self._store.layout.usable_prefix(num_tokens), hit.num_tokens
        found: tuple[RestoreSource, Node] | None = None
        for tier in self._tiers:
            node = tier.find(lease.chain, usable // BLOCK_SIZE)
            if node is not None and node.depth * BLOCK_SIZE > longest:
                found, longest = (tier, node), node.depth * BLOCK_SIZE
        return found

    def pays(self, tier: RestoreSource, source: Node, hit: PrefixHit, *, is_busy: bool) -> bool:
        """Return whether to load the prefix that ends at `source` rather than to compute it from the arena's `hit`."""
        layout, num_blocks = self._store.layout, source.depth - hit.kv_num_tokens // BLOCK_SIZE
        num_bytes = max(0, num_blocks) * layout.block_bytes
        if source.checkpoint is not None:
            num_bytes += layout.slot_bytes
        return tier.pays(num_bytes, hit.num_tokens, source.depth * BLOCK_SIZE, is_busy=is_busy)

    def begin(self, lease: Lease, order: tuple[int, int], tier: RestoreSource, source: Node, hit: PrefixHit) -> None:
        """Start to restore the prefix that ends at `source` for a waiting request. Nothing is copied yet.

        Pins `hit`, the arena's part, and holds `source` in `tier`. No other restore may be under way.
        """
        assert self.current is None
        node = hit.path[-1] if hit.path else self._store.tree.root(lease.chain.root)
        self._store.tree.pin(node)
        tier.hold(source)
        self.current = Restore(lease, order, tier, source, source.checkpoint, node, hit.num_tokens)

    def advance(self) -> bool:
        """Copy as much of the current prefix as the plan still takes. Returns whether all of it is copied now.

        The restore is dropped, and False returned, if the arena has no room for it, its prefix was condemned, or its
        tier cannot read it.
        """
        restore = self.current
        assert restore is not None
        while not restore.is_complete and self._left_bytes > 0:
            self._follow(restore)
            if restore.node.condemned or restore.source.condemned or restore.tier.is_stalled():
                self.drop()
                return False
            num_moves = len(self._store.arena.moves)
            path = self._path(restore.source, restore.node.depth)
            num_ready = restore.tier.num_ready(path, self._missing_state(restore))
            self.has_loaded = self.has_loaded or len(self._store.arena.moves) > num_moves
            if path and (num_ready or not self._store.layout.has_kv):
                loaded = self._load_blocks(restore, num_ready)
            elif not path and (num_ready or self._missing_state(restore) is None):
                loaded = self._load_state(restore)
            elif restore.tier.is_reading:
                return False
            else:  # nothing is to come
                loaded = False
            if not loaded:
                self.drop()
                return False
        return restore.is_complete

    def _missing_state(self, restore: Restore) -> Checkpoint | None:
        """Return the state at the prefix's end; None if it has none or the arena has it already."""
        if restore.node.depth == restore.source.depth and restore.node.checkpoint is not None:
            return None
        return restore.source_checkpoint

    def _follow(self, restore: Restore) -> None:
        """Go on to the deepest node of the prefix that the arena has; requests may have filed some meanwhile."""
        node, hashes, find = restore.node, restore.lease.chain.hashes, self._store.tree.find
        while node.depth < restore.source.depth and (present := find(hashes[node.depth])) is not None:
            node = present
        self._hold(restore, node)

    def _hold(self, restore: Restore, node: Node) -> None:
        if node is not restore.node:
            self._store.tree.pin(node)
            self._store.unpin(restore.node)
            restore.node = node

    def _load_blocks(self, restore: Restore, num_ready: int) -> bool:
        """Load the next blocks, of which the tier has `num_ready` ready, and file them.

        Returns False if there is no room for a single one.
        """
        chain, layout, start = restore.lease.chain, self._store.layout, restore.node.depth
        count = restore.source.depth - start
        blocks = [NO_BLOCK] * count
        if layout.has_kv:
            count = min(count, num_ready, max(1, self._left_bytes // layout.block_bytes))
            blocks = self._store.take_blocks(restore.node, count)
            count = len(blocks)
            if not count:
                return False
            # Read the places in the tier only now: taking blocks may have evicted entries to it and compacted it.
            sources = self._path(restore.source, start)[:count]
            self._store.arena.moves += [
                restore.tier.load(node, None, block) for node, block in zip(sources, blocks, strict=True)
            ]
            self._count(count * layout.block_bytes)
        end = start + count
        nodes = self._store.add_blocks(restore.node, chain.hashes[start:end], chain.blocks[start:end], blocks)
        self._hold(restore, nodes[-1])
        return True

    def _load_state(self, restore: Restore) -> bool:
        """Load the state at the prefix's end if there is one, and complete the restore. False: no slot."""
        source, node = restore.source_checkpoint, restore.node
        if source is not None:
            if node.checkpoint is None:
                owner = StateSave(source.num_tokens, source.origin)
                slot = self._store.take_slot(owner)
                if slot is None:
                    return False
                self._store.arena.moves.append(restore.tier.load(source.node, source, slot))
                self._count(self._store.layout.slot_bytes)
                self._store.adopt(node, slot, source)
            restore.loaded = node.checkpoint
            assert restore.loaded is not None
            self._store.start_reading(restore.loaded)
        restore.tier.count_use(restore.source, source)
        restore.is_complete = True
        return True

    def _path(self, node: Node, start: int) -> list[Node]:
        """Return the tier's nodes from depth `start + 1` down to `node`."""
        path: list[Node] = []
        while node.depth > start:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        return path[::-1]

    def _count(self, num_bytes: int) -> None:
        self.has_loaded = True
        self._left_bytes -= num_bytes

    def drop(self, lease: Lease | None = None) -> bool:
        """Stop the current restore if it is for this lease, or for any lease if none is given.

        What was loaded stays in the arena. Returns whether a restore was stopped.
        """
        restore = self.current
        if restore is None or not (lease is None or restore.lease is lease):
            return False
        self.current = None
        if restore.loaded is not None:
            self._store.done_reading(restore.loaded)
        self._store.unpin(restore.node)
        restore.tier.release(restore.source, restore.source_checkpoint)
        return True
