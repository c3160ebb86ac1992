"""The cached entries: keeps tree, arena, eviction order and ghosts in step."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Final

from forkpoint.cache.arena import Arena, UnitOwner
from forkpoint.cache.counters import CacheCounters, CacheStats
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.eviction_keys import EvictionKeys
from forkpoint.cache.eviction_queue import EvictionQueue
from forkpoint.cache.ghosts import GhostKind, GhostTable
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.restorable import Restorable
from forkpoint.cache.tree import Checkpoint, Entry, Node, Origin, PrefixTree, nearest_checkpoint
from forkpoint.cache.windows import WindowBlocks, WindowRuns
from forkpoint.config import BLOCK_SIZE

# Entries whose keys are computed again for each unit taken. A key may fall about five times per arena of new data.
PUSHED_PER_UNIT: Final = 8


class PrefixStore:
    """Cached blocks and checkpoints over one arena.

    Room comes from free units first, then from compaction, then from keys and values with no checkpoint at or below
    them (`dead` leaves), then from the checkpoint with the smallest key. In a layout without states, which has no
    checkpoints, the leaf with the smallest key is evicted.
    """

    def __init__(
        self, layout: CacheLayout, arena: Arena, policy: EvictionPolicy, cost: RecomputeCost, num_ghosts: int
    ) -> None:
        self.layout = layout
        self.arena = arena
        self.tree = PrefixTree()
        self.windows = WindowBlocks(layout, arena)
        self.ghosts = GhostTable(num_ghosts)
        self.counters = CacheCounters()
        self.num_checkpoints = 0
        self.num_read = 0  # checkpoints with readers
        self.restorable: Restorable | None = None  # tracks what lookups can find, from `watch` on
        self.keep: Callable[[Entry], None] | None = None  # offers what is evicted to a lower tier
        self.policy = policy
        self.keys = EvictionKeys(layout, arena, policy, cost)
        self._dead: OrderedDict[Node, None] = OrderedDict()  # leaves that may be dead, in the order of eviction
        self._queue = EvictionQueue[Entry](self.keys.of, self.keys.due)

    # --- room

    def take_blocks(self, owner: UnitOwner, count: int, below: float | None = None) -> list[int]:
        """Take up to `count` blocks, evicting as needed; fewer if the rest is in use.

        With `below`, evict only entries whose key is smaller.
        """
        taken = self.arena.take_blocks(owner, count)
        self._queue.push_due(self.arena.turnover, PUSHED_PER_UNIT * count)
        while len(taken) < count:
            if dead := self._evict_dead(count - len(taken)):
                blocks = [node.block for node in dead]
                self.arena.reissue_blocks(blocks, owner)
                taken += blocks
            elif self.evict_least(below):
                taken += self.arena.take_blocks(owner, count - len(taken))
            else:
                break
        return taken

    def take_slot(self, owner: UnitOwner, below: float | None = None) -> int | None:
        """Take a slot, evicting as needed; with `below` only entries whose key is smaller. None: no room."""
        return self._take_unit(lambda: self.arena.take_slot(owner), below)

    def take_window_block(self, window: int, owner: UnitOwner) -> int | None:
        """Take a block of `layout.windows[window]`, evicting as needed. None: all are in use."""
        return self._take_unit(lambda: self.arena.take_window_block(window, owner), None)

    def _take_unit(self, take: Callable[[], int | None], below: float | None) -> int | None:
        self._queue.push_due(self.arena.turnover, PUSHED_PER_UNIT)
        while (unit := take()) is None:
            most = self.arena.num_blocks_until_page if self.layout.has_kv else len(self._dead)
            if dead := self._evict_dead(most):
                self._give_blocks(dead)
            elif not self.evict_least(below):
                return None
        return unit

    def evict_least(self, below: float | None = None) -> bool:
        """Evict the checkpoint (without states: the leaf) with the smallest key, if that key is smaller than `below`.

        The next lower tier may keep a copy. Returns False if there is no such entry.
        """
        found = self._queue.lowest(self.arena.turnover)
        if found is None or (below is not None and found[0] >= below):
            return False
        entry = found[1]
        if self.keep is not None:
            self.keep(entry)
        if isinstance(entry, Node):
            self._give_blocks(self._evict_leaves(entry, 1))
            return True
        self.counters.checkpoints_evicted[entry.origin] += 1
        self.ghosts.add([entry.node.hash], GhostKind.CHECKPOINT)
        above = nearest_checkpoint(entry.node.parent)
        stands_in = self.policy.evicted(entry, above)
        self._remove_checkpoint(entry)
        if above is not None and stands_in:
            above.last_used = max(above.last_used, entry.last_used)
            self.requeue(above)
        return True

    def next_victims(self, most: int) -> list[Entry]:
        """Return the entry that `evict_least` would evict now, and up to `most - 1` that come next, about in order."""
        return self._queue.first(self.arena.turnover, most)

    def _evict_dead(self, most: int) -> list[Node]:
        """Evict up to `most` blocks that no checkpoint needs, the ends of histories first. Return their nodes.

        The caller gives the blocks back to the arena or reuses them.
        """
        gone: list[Node] = []
        while self._dead and len(gone) < most:
            node, _ = self._dead.popitem(last=False)
            if node.is_evictable:
                gone += self._evict_leaves(node, most - len(gone))
        return gone

    def _evict_leaves(self, leaf: Node, most: int) -> list[Node]:
        """Evict a leaf and the ancestors that become leaves, `most` nodes in all, and return them.

        The caller gives the blocks back to the arena or reuses them.
        """
        gone = self.tree.remove(leaf, most)
        for node in gone:
            self._dead.pop(node, None)
            if self.restorable is not None:
                self.restorable.lost(node)
        if not leaf.condemned:
            self.ghosts.add([node.hash for node in gone], GhostKind.KV)
            self.counters.blocks_evicted += len(gone)
        parent = gone[-1].parent
        assert parent is not None
        self._queue_leaf(parent, first=True)
        return gone

    def _give_blocks(self, nodes: Sequence[Node]) -> None:
        if self.layout.has_kv:
            self.arena.give_blocks([node.block for node in nodes])

    def _queue_leaf(self, node: Node, first: bool = False) -> None:
        """Queue a leaf for eviction: its checkpoint if it has one, or else the node. A condemned node is removed.

        With `first` it is the next dead leaf to be evicted.
        """
        if node.checkpoint is not None and not node.children:
            self._queue.push(node.checkpoint)  # it alone now holds its keys and values, so it is worth less per byte
        if node.depth == 0 or not node.is_evictable:
            return
        if node.condemned:
            self._sweep(node)
        elif self.layout.has_states:
            self._dead.setdefault(node)
            if first:
                self._dead.move_to_end(node, last=False)
        else:
            self._queue.push(node)

    def by_worth(self) -> list[Entry]:
        """Return the checkpoints (without states: the leaves) that can be evicted, the largest key first."""
        entries: list[Entry] = []
        for node in self.tree.nodes():
            entry = node.checkpoint if self.layout.has_states else node
            if entry is not None and entry.is_evictable and not node.condemned:
                entries.append(entry)
        return sorted(entries, key=self.keys.of, reverse=True)

    # --- entries

    def add_blocks(
        self, parent: Node, hashes: Sequence[BlockHash], tokens: Sequence[bytes], blocks: Sequence[int]
    ) -> list[Node]:
        """File a chain of new blocks under `parent`. Returns their nodes, which now own the blocks."""
        nodes = self.tree.extend(parent, hashes, tokens, blocks)
        for node in nodes:
            node.last_used = self.arena.turnover
        if self.layout.has_kv:
            self.arena.blocks.transfer(blocks, nodes)
        self.ghosts.discard(hashes, GhostKind.KV)
        if self.restorable is not None and not self.layout.has_states:
            for node in nodes:
                self.restorable.gained(node)
        return nodes

    def add_checkpoint(
        self,
        node: Node,
        slot: int,
        origin: Origin,
        decoded: bool,
        note: object = None,
        is_read: bool = False,
        windows: WindowRuns = (),
    ) -> Checkpoint | None:
        """Make `slot`, with its blocks of windows, the checkpoint of `node`, saved by a request with that note.

        `is_read`: the next plan reads it. Returns None if `node` keeps its present checkpoint; the slot is then freed.
        A checkpoint is replaced only if decode kernels computed it, nobody reads it, and prefill kernels computed the
        new one.
        """
        present = node.checkpoint
        if present is not None and (present.decoded <= decoded or present.num_readers):
            self.arena.give_slot(slot)
            return None
        if present is not None:
            self.drop_checkpoint(present)
        checkpoint = self._enter(Checkpoint(node, slot, node.depth * BLOCK_SIZE, origin, decoded, windows))
        if is_read:
            self.start_reading(checkpoint)
        self.counters.checkpoints_saved[origin] += 1
        self.policy.saved(checkpoint, nearest_checkpoint(node.parent), note)
        self._queue.push(checkpoint)
        return checkpoint

    def load_checkpoint(self, node: Node, slot: int, origin: Origin, decoded: bool) -> None:
        """Make `slot` the checkpoint of `node`, which has none. An earlier process saved it."""
        checkpoint = self._enter(Checkpoint(node, slot, node.depth * BLOCK_SIZE, origin, decoded))
        self.policy.saved(checkpoint, None, None)
        self._queue.push_later(checkpoint)

    def adopt(self, node: Node, slot: int, source: Checkpoint, windows: WindowRuns = ()) -> Checkpoint:
        """Make `slot`, a copy of another store's checkpoint, the checkpoint of `node`, which has none.

        The blocks of its windows were copied to `windows`.
        """
        assert node.checkpoint is None
        copy = self._enter(Checkpoint(node, slot, source.num_tokens, source.origin, source.decoded, windows))
        self.copy_use(source, copy)
        return copy

    def copy_use(self, source: Checkpoint, copy: Checkpoint) -> None:
        """Let the copy of another store's checkpoint count as used now, and as often as its source."""
        copy.last_used = self.arena.turnover
        copy.num_hits, copy.superseded = source.num_hits, source.superseded
        self.policy.copied(source, copy)
        self.requeue(copy)

    def _enter(self, checkpoint: Checkpoint) -> Checkpoint:
        """Attach a checkpoint to its node, as its slot's owner and as used now, and return it.

        The caller still has to queue it for eviction.
        """
        node = checkpoint.node
        checkpoint.last_used = self.arena.turnover
        node.checkpoint = checkpoint
        if self.restorable is not None:
            self.restorable.gained(node)
        self.arena.slots.transfer([checkpoint.slot], [checkpoint])
        self.windows.hold(checkpoint.windows)
        self.num_checkpoints += 1
        self.ghosts.discard([node.hash], GhostKind.CHECKPOINT)
        return checkpoint

    def drop_checkpoint(self, checkpoint: Checkpoint, keep_slot: bool = False) -> None:
        """Remove a checkpoint that nobody reads or would use. With `keep_slot` the caller takes over its slot."""
        self.policy.dropped(checkpoint)
        self._remove_checkpoint(checkpoint, keep_slot)

    def _remove_checkpoint(self, checkpoint: Checkpoint, keep_slot: bool = False) -> None:
        assert checkpoint.is_evictable
        checkpoint.removed = True
        checkpoint.node.checkpoint = None
        if self.restorable is not None:
            self.restorable.lost(checkpoint.node)
        self.num_checkpoints -= 1
        if not keep_slot:
            self.arena.give_slot(checkpoint.slot)
        self.windows.let_go(checkpoint.windows)
        self._queue_leaf(checkpoint.node)

    def start_reading(self, checkpoint: Checkpoint) -> None:
        """Count one reader of the checkpoint more. It cannot be evicted before `done_reading`."""
        checkpoint.num_readers += 1
        if checkpoint.num_readers == 1:
            self.num_read += 1
            self.windows.hold(checkpoint.windows, busy=True)

    def done_reading(self, checkpoint: Checkpoint) -> None:
        """Count one reader of the checkpoint less. Without readers it can be evicted again.

        A condemned checkpoint is dropped then, and its slot is free.
        """
        assert checkpoint.num_readers > 0
        checkpoint.num_readers -= 1
        if not checkpoint.num_readers:
            self.num_read -= 1
            self.windows.let_go(checkpoint.windows, busy=True)
            self.requeue(checkpoint)

    def requeue(self, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint again after a change of what its key depends on. Drop it if it is condemned."""
        if checkpoint.removed:
            return
        if checkpoint.node.condemned and checkpoint.is_evictable:
            self.drop_checkpoint(checkpoint)
        else:
            self._queue.push(checkpoint)

    def resume(self, checkpoint: Checkpoint, note: object) -> object:
        """Count a hit: a request resumes from the checkpoint. Takes and returns the request's note."""
        checkpoint.last_used = self.arena.turnover
        checkpoint.num_hits += 1
        self.counters.checkpoint_hits[checkpoint.origin] += 1
        note = self.policy.resumed(checkpoint, note)
        self.requeue(checkpoint)
        return note

    def note_request_end(self, checkpoint: Checkpoint, note: object, awaits_tool: bool) -> None:
        """Note that a request that used or saved the checkpoint has ended. The checkpoint counts as used now."""
        if not checkpoint.removed:
            checkpoint.last_used = self.arena.turnover
            self.policy.request_ended(checkpoint, note, awaits_tool=awaits_tool)
            self.requeue(checkpoint)

    def supersede(self, checkpoint: Checkpoint) -> None:
        """Note that the conversation has a later checkpoint."""
        checkpoint.superseded = True
        self.policy.superseded(checkpoint)
        self.requeue(checkpoint)

    def count_hit(self, node: Node) -> None:
        """Count a hit in a layout without states: a request resumes at the node."""
        node.num_hits += 1

    def touch(self, node: Node) -> None:
        """Note that a node was in use until now. Eviction may take it if it is a leaf that nothing holds."""
        node.last_used = self.arena.turnover
        self._queue_leaf(node)

    def unpin(self, node: Node) -> None:
        self.tree.unpin(node)
        self.touch(node)

    def condemn(self, node: Node) -> None:
        """Hide `node` and all below it from lookups, and remove what nobody holds."""
        below = self.tree.condemn(node)
        for item in below:
            if item.checkpoint is not None and item.checkpoint.num_readers == 0:
                self.drop_checkpoint(item.checkpoint)
        for item in reversed(below):
            if self.restorable is not None:
                self.restorable.lost(item)
            self._sweep(item)

    def condemn_all(self, items: Iterable[Entry]) -> None:
        """Condemn the nodes still in the tree, with all below them, and drop the checkpoints still there."""
        for item in items:
            if item.removed:
                continue
            if isinstance(item, Node):
                self.condemn(item)
            elif item.num_readers:
                self.condemn(item.node)  # a step in flight reads it, so it goes later, with its node
            else:
                self.drop_checkpoint(item)

    def _sweep(self, node: Node) -> None:
        """Remove a condemned node that nothing holds, and the condemned ancestors that become leaves."""
        if node.condemned and node.is_evictable:
            self._give_blocks(self._evict_leaves(node, node.depth))

    def reset(self) -> None:
        """Condemn everything and forget the ghosts. Entries that running requests hold are freed when these end."""
        if self.restorable is not None:
            self.restorable.clear()
        for node in [node for node in self.tree.nodes() if node.parent is not None and not node.parent.depth]:
            self.condemn(node)
        self.ghosts.clear()
        self.policy.reset()

    def watch(self, room: str, *, has_private: bool, is_open: Callable[[], bool] = lambda: True) -> Restorable:
        """Start to track what lookups can find here while the room `is_open`, and return the tracker.

        It begins with what is here now.
        """
        self.restorable = Restorable(room, has_private=has_private, is_open=is_open)
        for node in self.tree.nodes():
            if node.checkpoint is not None or not self.layout.has_states:
                self.restorable.gained(node)
        return self.restorable

    def stats(self) -> CacheStats:
        """Return gauges and counters as they are now."""
        counted = {each.name: getattr(self.counters, each.name) for each in fields(self.counters)}
        counted |= {
            name: {str(why): n for why, n in c.items()} for name, c in counted.items() if isinstance(c, Counter)
        }
        arena = self.arena
        return CacheStats(
            **counted,
            num_pages=arena.num_pages,
            num_free_pages=arena.num_free_pages,
            num_blocks_used=arena.blocks.num_used,
            num_slots_used=arena.slots.num_used,
            num_cached_blocks=self.tree.num_nodes,
            num_checkpoints=self.num_checkpoints,
            num_ghosts=len(self.ghosts),
        )
