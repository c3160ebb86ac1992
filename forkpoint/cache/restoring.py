"""Restoring: copies a prefix from a tier or a peer to the arena, over several plans, for a request that waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forkpoint.cache.layout import NO_BLOCK
from forkpoint.cache.lease import Lease, StateSave
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.restore_source import RestoreSource
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tier_entries import BUFFERED_AT_ONCE, LOADED_AT_ONCE
from forkpoint.cache.tree import Checkpoint, Entry, Node, path_below
from forkpoint.cache.windows import WindowRow
from forkpoint.config import BLOCK_SIZE


@dataclass(slots=True, eq=False)
class Restore:
    """The prefix of one waiting request on its way into the arena. Restoring writes it.

    `source` holds `end`, the prefix's last node there. `node` is the deepest node that is in the arena by now; it is
    pinned. `loaded` is its checkpoint, which the restore reads so that it cannot be evicted.
    """

    lease: Lease
    order: tuple[int, int]  # the request's, as in ScheduledRequest
    source: RestoreSource
    end: Node
    end_checkpoint: Checkpoint | None
    node: Node
    num_tokens_before: int  # tokens that a lookup found in the arena
    loaded: Checkpoint | None = None
    is_complete: bool = False


class Restoring:
    """Loads one prefix at a time, so that requests that wait for memory never wait for each other's prefixes.

    Loaded entries are filed at once: a plan's copies run before its rows. Others read `current`, and `has_loaded`:
    whether the plan under construction loads something or starts to read something.
    """

    def __init__(self, store: PrefixStore, sources: Sequence[RestoreSource], *, streams: bool) -> None:
        """`store` is the arena's. If two `sources` have the same prefix, the first one is used.

        With `streams`, a plan loads from buffers of a device, all that has arrived if no other request runs.
        """
        self._store = store
        self._stored = store.layout.in_tiers()
        self._sources = sources
        self.current: Restore | None = None
        self.loaded_at_once = BUFFERED_AT_ONCE if streams else LOADED_AT_ONCE
        self.has_loaded = False
        self._left_bytes = 0

    def begin_plan(self, *, is_busy: bool) -> None:
        """Start to count what the next plan loads. `is_busy`: it has rows of other requests."""
        self._left_bytes, self.has_loaded = self.loaded_at_once, False
        if is_busy:
            self._left_bytes = min(self.loaded_at_once, LOADED_AT_ONCE)

    @property
    def is_reading(self) -> bool:
        """Whether the current restore waits for its source."""
        return self.current is not None and self.current.source.is_reading

    def comes_before(self, order: tuple[int, int]) -> bool:
        """Return whether there is a restore, and a request of this order has to wait for it."""
        return self.current is not None and self.current.order <= order and not self.current.source.gives_way

    def is_for(self, lease: Lease) -> bool:
        """Return whether a prefix is being restored for the request of this lease."""
        return self.current is not None and self.current.lease is lease

    def find(self, lease: Lease, num_tokens: int, hit: PrefixHit) -> tuple[RestoreSource, Node] | None:
        """Return the source of the longest prefix and the prefix's end there; None if the arena's `hit` is as long."""
        usable, longest = self._store.layout.usable_prefix(num_tokens), hit.num_tokens
        found: tuple[RestoreSource, Node] | None = None
        for source in self._sources:
            end = source.find(lease.chain, usable // BLOCK_SIZE)
            if end is not None and end.depth * BLOCK_SIZE > longest:
                found, longest = (source, end), end.depth * BLOCK_SIZE
        return found

    def pays(self, source: RestoreSource, end: Node, hit: PrefixHit, *, is_busy: bool) -> bool:
        """Return whether to load the prefix that ends at `end` rather than to compute it from the arena's `hit`."""
        layout, num_blocks = self._stored, end.depth - hit.kv_num_tokens // BLOCK_SIZE
        num_bytes = max(0, num_blocks) * layout.block_bytes
        if end.checkpoint is not None:
            num_bytes += layout.slot_bytes
        return source.pays(num_bytes, hit.num_tokens, end.depth * BLOCK_SIZE, is_busy=is_busy)

    def begin(self, lease: Lease, order: tuple[int, int], source: RestoreSource, end: Node, hit: PrefixHit) -> None:
        """Start to restore the prefix that ends at `end` for a waiting request. Nothing is copied yet.

        Pins `hit`, the arena's part, and holds `end` in `source`. No other restore may be under way.
        """
        assert self.current is None
        node = hit.path[-1] if hit.path else self._store.tree.root(lease.chain.root)
        self._store.tree.pin(node)
        source.hold(end)
        self.current = Restore(lease, order, source, end, end.checkpoint, node, hit.num_tokens)

    def advance(self, *, is_busy: bool = False) -> bool:
        """Copy as much of the current prefix as the plan still takes. Returns whether all of it is copied now.

        The restore is dropped, and False returned, if the arena has no room for it, or its prefix was condemned, or its
        source cannot read it or turns out to be slower than computing. `is_busy`: other requests run, too.
        """
        restore = self.current
        assert restore is not None
        while not restore.is_complete and self._left_bytes > 0:
            self._follow(restore)
            is_useless = restore.node.condemned or restore.source.has_lost(restore.end)
            if is_useless or restore.source.is_stalled() or not self._goes_on(restore, is_busy):
                self.drop()
                return False
            num_moves = len(self._store.arena.moves)
            path, has_kv = path_below(restore.node.depth, restore.end), self._store.layout.has_kv
            wanted: list[Entry] = [*path] if has_kv else []
            if (state := self._missing_state(restore)) is not None:
                wanted.append(state)
            num_ready = restore.source.num_ready(wanted, is_busy=is_busy)
            self.has_loaded = self.has_loaded or len(self._store.arena.moves) > num_moves
            if path and (num_ready or not has_kv):
                loaded = self._load_blocks(restore, num_ready)
            elif not path and (num_ready or state is None):
                loaded = self._load_state(restore)
            elif restore.source.is_reading:
                return False
            else:  # nothing is to come
                loaded = False
            if not loaded:
                self.drop()
                return False
            if is_busy and restore.source.is_reading:
                break  # all that has arrived is loaded, and another round would start as many reads again
        return restore.is_complete

    def _goes_on(self, restore: Restore, is_busy: bool) -> bool:
        """Return whether to go on rather than to compute from what the request can resume from now."""
        layout, end = self._stored, restore.end
        num_bytes = (end.depth - restore.node.depth) * layout.block_bytes * layout.has_kv
        start = restore.num_tokens_before
        if not layout.has_states:
            start = max(start, restore.node.depth * BLOCK_SIZE)
        elif self._missing_state(restore) is not None:
            num_bytes += layout.slot_bytes
        return restore.source.goes_on(num_bytes, start, end.depth * BLOCK_SIZE, is_busy=is_busy)

    def _missing_state(self, restore: Restore) -> Checkpoint | None:
        """Return the state at the prefix's end; None if it has none or the arena has it already."""
        if restore.node.depth == restore.end.depth and restore.node.checkpoint is not None:
            return None
        return restore.end_checkpoint

    def _follow(self, restore: Restore) -> None:
        """Go on to the deepest node of the prefix that the arena has; requests may have filed some meanwhile."""
        node, hashes, find = restore.node, restore.lease.chain.hashes, self._store.tree.find
        while node.depth < restore.end.depth and (present := find(hashes[node.depth])) is not None:
            node = present
        self._hold(restore, node)

    def _hold(self, restore: Restore, node: Node) -> None:
        if node is not restore.node:
            self._store.tree.pin(node)
            self._store.unpin(restore.node)
            restore.node = node

    def _load_blocks(self, restore: Restore, num_ready: int) -> bool:
        """Load the next blocks, of which the source has `num_ready` ready, and file them.

        Returns False if there is no room for a single one.
        """
        chain, layout, start = restore.lease.chain, self._stored, restore.node.depth
        count = restore.end.depth - start
        blocks = [NO_BLOCK] * count
        if layout.has_kv:
            count = min(count, num_ready, max(1, self._left_bytes // layout.block_bytes))
            blocks = self._store.take_blocks(restore.node, count)
            count = len(blocks)
            if not count:
                return False
            # Read the places only now: taking blocks may have evicted entries to the source and compacted it.
            path = path_below(start, restore.end)[:count]
            self._store.arena.moves += [
                restore.source.load(node, block) for node, block in zip(path, blocks, strict=True)
            ]
            self._count(count * layout.block_bytes)
        end = start + count
        nodes = self._store.add_blocks(restore.node, chain.hashes[start:end], chain.blocks[start:end], blocks)
        restore.source.note_loaded(restore.end, nodes)
        self._hold(restore, nodes[-1])
        return True

    def _load_state(self, restore: Restore) -> bool:
        """Load the state at the prefix's end if there is one, and complete the restore. False: there is no room."""
        checkpoint, node = restore.end_checkpoint, restore.node
        if checkpoint is not None:
            if node.checkpoint is None and not self._copy_state(restore.source, checkpoint, node):
                return False
            restore.loaded = node.checkpoint
            assert restore.loaded is not None
            self._store.start_reading(restore.loaded)
        restore.source.count_use(checkpoint or restore.end)
        restore.is_complete = True
        return True

    def _copy_state(self, source: RestoreSource, checkpoint: Checkpoint, node: Node) -> bool:
        """Copy a checkpoint of a source, with the blocks of its windows, to `node`. False: there is no room."""
        store, owner = self._store, StateSave(checkpoint.num_tokens, checkpoint.origin)
        slot = store.take_slot(owner)
        if slot is None:
            return False
        owner.slot = slot
        rows = [WindowRow(group.first_block(checkpoint.num_tokens)) for group in store.layout.windows]
        ends = [store.windows.extend(row, i, node.depth, store.take_window_block) for i, row in enumerate(rows)]
        has_room = all(end >= node.depth for end in ends)
        if has_room:
            # Read the places only now: each unit that was taken may have moved others, in the arena and in the source.
            windows = tuple(tuple(row.blocks) for row in rows)
            store.arena.moves.append(source.load(checkpoint, owner.slot, windows))
            self._count(self._stored.slot_bytes)
            store.adopt(node, owner.slot, checkpoint, windows)
        else:
            store.arena.give_slot(owner.slot)
        store.windows.clear(rows)
        return has_room

    def _count(self, num_bytes: int) -> None:
        self.has_loaded = True
        self._left_bytes -= num_bytes

    def drop(self, lease: Lease | None = None) -> bool:
        """Stop the current restore if it is for this lease, or for any lease if none is given.

        Loaded entries stay in the arena. Returns whether a restore was stopped.
        """
        restore = self.current
        if restore is None or not (lease is None or restore.lease is lease):
            return False
        self.current = None
        if restore.loaded is not None:
            self._store.done_reading(restore.loaded)
        self._store.unpin(restore.node)
        restore.source.release(restore.end, restore.end_checkpoint)
        return True
