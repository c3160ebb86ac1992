"""Restoring: copies a prefix from a tier to the arena, over several plans, for a request that waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forkpoint.cache.disk_entries import FETCHED_AT_ONCE, LOADED_AT_ONCE
from forkpoint.cache.layout import NO_BLOCK
from forkpoint.cache.lease import Lease, StateSave
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.restore_source import RestoreSource
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import Checkpoint, Node, path_below
from forkpoint.cache.windows import WindowRow
from forkpoint.config import BLOCK_SIZE


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

    def __init__(self, store: PrefixStore, tiers: Sequence[RestoreSource], *, streams: bool) -> None:
        """`store` is the arena's. Of two tiers with the same prefix the first one is used.

        With `streams`, a plan loads from buffers of a device, all that has arrived if no other request runs.
        """
        self._store = store
        self._stored = store.layout.in_tiers()
        self._tiers = tiers
        self.current: Restore | None = None
        self.loaded_at_once = FETCHED_AT_ONCE if streams else LOADED_AT_ONCE
        self.has_loaded = False
        self._left_bytes = 0

    def begin_plan(self, *, is_busy: bool) -> None:
        """Start to count what the next plan loads. `is_busy`: it has rows of other requests."""
        self._left_bytes, self.has_loaded = self.loaded_at_once, False
        if is_busy:
            self._left_bytes = min(self.loaded_at_once, LOADED_AT_ONCE)

    @property
    def is_reading(self) -> bool:
        """Whether the current restore waits for its tier."""
        return self.current is not None and self.current.tier.is_reading

    def comes_before(self, order: tuple[int, int]) -> bool:
        """Return whether there is a restore, and a request of this order has to wait for it."""
        return self.current is not None and self.current.order <= order and not self.current.tier.gives_way

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
        layout, num_blocks = self._stored, source.depth - hit.kv_num_tokens // BLOCK_SIZE
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

    def advance(self, *, is_busy: bool = False) -> bool:
        """Copy as much of the current prefix as the plan still takes. Returns whether all of it is copied now.

        The restore is dropped, and False returned, if the arena has no room for it, its prefix was condemned, its tier
        cannot read it, or its tier turns out to be slower than computing. `is_busy`: other requests run, too.
        """
        restore = self.current
        assert restore is not None
        while not restore.is_complete and self._left_bytes > 0:
            self._follow(restore)
            is_useless = restore.node.condemned or restore.tier.has_lost(restore.source)
            if is_useless or restore.tier.is_stalled() or not self._goes_on(restore, is_busy):
                self.drop()
                return False
            num_moves = len(self._store.arena.moves)
            path = path_below(restore.node.depth, restore.source)
            num_ready = restore.tier.num_ready(path, self._missing_state(restore), is_busy=is_busy)
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
            if is_busy and restore.tier.is_reading:
                break  # all that has arrived is loaded, and another round would start as many reads again
        return restore.is_complete

    def _goes_on(self, restore: Restore, is_busy: bool) -> bool:
        """Return whether to go on rather than to compute from what the request can resume from now."""
        layout, source = self._stored, restore.source
        num_bytes = (source.depth - restore.node.depth) * layout.block_bytes * layout.has_kv
        start = restore.num_tokens_before
        if not layout.has_states:
            start = max(start, restore.node.depth * BLOCK_SIZE)
        elif self._missing_state(restore) is not None:
            num_bytes += layout.slot_bytes
        return restore.tier.goes_on(num_bytes, start, source.depth * BLOCK_SIZE, is_busy=is_busy)

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
        chain, layout, start = restore.lease.chain, self._stored, restore.node.depth
        count = restore.source.depth - start
        blocks = [NO_BLOCK] * count
        if layout.has_kv:
            count = min(count, num_ready, max(1, self._left_bytes // layout.block_bytes))
            blocks = self._store.take_blocks(restore.node, count)
            count = len(blocks)
            if not count:
                return False
            # Read the places in the tier only now: taking blocks may have evicted entries to it and compacted it.
            sources = path_below(start, restore.source)[:count]
            self._store.arena.moves += [
                restore.tier.load(node, None, block) for node, block in zip(sources, blocks, strict=True)
            ]
            self._count(count * layout.block_bytes)
        end = start + count
        nodes = self._store.add_blocks(restore.node, chain.hashes[start:end], chain.blocks[start:end], blocks)
        restore.tier.note_loaded(restore.source, nodes)
        self._hold(restore, nodes[-1])
        return True

    def _load_state(self, restore: Restore) -> bool:
        """Load the state at the prefix's end if there is one, and complete the restore. False: there is no room."""
        source, node = restore.source_checkpoint, restore.node
        if source is not None:
            if node.checkpoint is None and not self._copy_state(restore.tier, source, node):
                return False
            restore.loaded = node.checkpoint
            assert restore.loaded is not None
            self._store.start_reading(restore.loaded)
        restore.tier.count_use(restore.source, source)
        restore.is_complete = True
        return True

    def _copy_state(self, tier: RestoreSource, source: Checkpoint, node: Node) -> bool:
        """Copy a checkpoint of a tier, with the blocks of its windows, to `node`. False: there is no room."""
        store, owner = self._store, StateSave(source.num_tokens, source.origin)
        slot = store.take_slot(owner)
        if slot is None:
            return False
        owner.slot = slot
        rows = [WindowRow(group.first_block(source.num_tokens)) for group in store.layout.windows]
        ends = [store.windows.extend(row, i, node.depth, store.take_window_block) for i, row in enumerate(rows)]
        has_room = all(end >= node.depth for end in ends)
        if has_room:
            # Read the places only now: each unit that was taken may have moved others, in the arena and in the tier.
            windows = tuple(tuple(row.blocks) for row in rows)
            store.arena.moves.append(tier.load(source.node, source, owner.slot, windows))
            self._count(self._stored.slot_bytes)
            store.adopt(node, owner.slot, source, windows)
        else:
            store.arena.give_slot(owner.slot)
        store.windows.clear(rows)
        return has_room

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
