"""Tiers: cache entries that left the arena. The host tier keeps them in the host's memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from forkpoint.cache.arena import Arena, Move, MoveKind, MoveRoute
from forkpoint.cache.counters import CacheCounters, CacheStats
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.hashing import BlockHash, HashChain
from forkpoint.cache.layout import NO_BLOCK, CacheLayout
from forkpoint.cache.lease import StateSave
from forkpoint.cache.load_choice import LoadChoice
from forkpoint.cache.restorable import Restorable, is_private
from forkpoint.cache.restore_source import RestoreSource
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tier_entries import TierReport
from forkpoint.cache.tier_reads import TierReads
from forkpoint.cache.tree import Checkpoint, Entry, Node, nearest_checkpoint, node_of
from forkpoint.cache.windows import WindowRuns, ids_of

NEAR_BLOCKS: Final = 8  # blocks; an earlier state at most this far away counts as near


class Tier(RestoreSource):
    """Keeps what a room above evicts, as a `PrefixStore` over pages of its own.

    A checkpoint is stored with its whole path, so that the tier alone can restore it. Its slot here has the blocks of
    its windows too (`CacheLayout.in_tiers`). In a layout without states the path of an evicted block is stored. Blocks
    that the tier already has are not copied again. Entries stay when they are loaded: their next eviction copies
    nothing. `moves` is the list of copies that all rooms share.
    """

    def __init__(
        self,
        layout: CacheLayout,
        arena: Arena,
        policy: EvictionPolicy,
        cost: RecomputeCost,
        counters: CacheCounters,
        *,
        has_private: bool,
    ) -> None:
        """`layout` is that of tiers. `has_private`: the arena has entries that only one request finds. None is kept."""
        self.layout = layout
        self.arena = arena
        self.store = PrefixStore(layout, arena, policy, cost, num_ghosts=0)
        self.counters = counters
        self.choice: LoadChoice | None = None  # set if loading is weighed against computing
        self._has_private = has_private

    @abstractmethod
    def _send(self, entry: Entry, unit: int, route: MoveRoute) -> None:
        """Add the copy of another room's entry to a unit of the tier, by this route."""

    @abstractmethod
    def _skip(self, entry: Entry) -> None:
        """Count an entry that is not stored."""

    def may_store(self, num_bytes: int) -> bool:
        """Return whether the tier takes `num_bytes` more now."""
        return True

    @property
    def is_writing(self) -> bool:
        """Whether copies to the tier are still to be reported."""
        return False

    def is_open(self) -> bool:
        """Return whether prefixes are restored from here now."""
        return True

    def pays(self, num_bytes: int, start: int, end: int, *, is_busy: bool) -> bool:
        return self.choice is None or self.choice.pays(num_bytes, start, end, is_busy=is_busy)

    def watch(self) -> Restorable:
        """Start to track what can be restored from here, and return the tracker."""
        return self.store.watch(self.name, has_private=False, is_open=self.is_open)

    def store_ahead(self, store: PrefixStore) -> None:
        """Store a part of what the arena's `store` evicts next, if that needs time."""
        return

    def num_ready(self, entries: Sequence[Entry], *, is_busy: bool) -> int:
        return len(entries)

    @abstractmethod
    def fill(self, stats: CacheStats) -> None:
        """Write the tier's gauges."""

    def apply(self, report: TierReport) -> None:
        """Take in what the worker reports of copies that end later than their plan.

        Tickets of other tiers are among them.
        """
        return

    def keep(self, entry: Entry, route: MoveRoute) -> None:
        """Store an entry of a room above, and the path to it, before it is evicted. `route` leads here from that room.

        Nothing is stored if that would evict entries of the tier that are worth more, or for a state that its row may
        soon renew (`_can_do_without`).
        """
        node = node_of(entry)
        assert not node.condemned, "condemned entries are dropped, not evicted"
        if self._can_do_without(entry):
            return
        split = self._split(node)
        if split is None:
            return
        top, missing = split
        if not missing and (entry is node or top.checkpoint is not None):
            self._touch(top, entry)
            return
        self.store.tree.pin(top)
        if not self._copy(top, missing, entry, route):
            self._skip(entry)
        self.store.unpin(top)

    def _can_do_without(self, entry: Entry) -> bool:
        """Return whether an entry is a state whose row may soon renew it, and an earlier state is near.

        Rows that come to a boundary together evict as many such states in one plan, so only one is copied at a time. If
        a row ends before it comes to the next boundary, at most NEAR_BLOCKS blocks have to be computed again.
        """
        if isinstance(entry, Node) or not (self.is_writing and entry.is_provisional):
            return False
        near = entry.node.parent
        for _ in range(NEAR_BLOCKS):
            if near is None:
                return False
            stored = self.store.tree.find(near.hash)
            if near.checkpoint is not None or (stored is not None and stored.checkpoint is not None):
                return True
            near = near.parent
        return False

    def _split(self, node: Node) -> tuple[Node, list[Node]] | None:
        """Return the tier's deepest node on the path to another room's node, and that room's nodes below it.

        None if one of them is private. The tier's node may be a new root, which goes when it is unpinned.
        """
        tree, missing = self.store.tree, list[Node]()
        top: Node | None = None
        while top is None and node.parent is not None:
            top = tree.find(node.hash)
            if top is None:
                missing.append(node)
                node = node.parent
        if self._has_private and any(map(is_private, missing)):
            return None
        return top or tree.root(node.hash), missing[::-1]

    def _touch(self, node: Node, source: Entry) -> None:
        """Note that `source`, an entry of the room above, was in use until now. The tier has it at `node`."""
        self.store.touch(node)
        if isinstance(source, Checkpoint) and node.checkpoint is not None:
            self.store.copy_use(source, node.checkpoint)

    def _copy(
        self, top: Node, missing: Sequence[Node], entry: Entry, route: MoveRoute, *, is_whole: bool = True
    ) -> bool:
        """Copy nodes below `top`, and a checkpoint at their end if it is the `entry`, into units of the tier.

        Without `is_whole` the nodes are only a part of the path to the entry, and no checkpoint is copied yet. Returns
        False if nothing is stored, because the tier may not or has nothing worth less to evict.
        """
        below: float | None = None
        owner: StateSave | None = None
        checkpoint = entry if is_whole and isinstance(entry, Checkpoint) else None
        num_bytes = len(missing) * self.layout.block_bytes
        if checkpoint is not None:
            num_bytes += self.layout.slot_bytes
        if not self.may_store(num_bytes):
            return False
        if isinstance(entry, Checkpoint):
            has_children = not missing and bool(top.children)
            below = self.store.keys.of_copy(entry, nearest_checkpoint(top), has_children)
        if checkpoint is not None:
            owner = StateSave(checkpoint.num_tokens, checkpoint.origin)
            slot = self.store.take_slot(owner, below)
            if slot is None:
                return False
            owner.slot = slot
        # Taking blocks may compact slots, which their owners follow, but moves no blocks.
        blocks = [NO_BLOCK] * len(missing)
        if self.layout.has_kv:
            blocks = self.store.take_blocks(owner or top, len(missing), below)
            if len(blocks) < len(missing):
                self.arena.give_blocks(blocks)
                if owner is not None:
                    self.arena.give_slot(owner.slot)
                return False
            for node, block in zip(missing, blocks, strict=True):
                self._send(node, block, route)
        if missing:
            top = self.store.add_blocks(
                top, [node.hash for node in missing], [self._tokens(node) for node in missing], blocks
            )[-1]
        if checkpoint is not None and owner is not None:
            self._send(checkpoint, owner.slot, route)
            self.store.adopt(top, owner.slot, checkpoint)
        else:
            self.store.touch(top)
        return True

    def _tokens(self, node: Node) -> bytes:
        """Return what the tier keeps of a block's tokens."""
        return node.tokens

    def find(self, chain: HashChain, max_blocks: int) -> Node | None:
        path = self._match(chain, max_blocks)
        if self.layout.has_states:
            return next((node for node in reversed(path) if node.checkpoint is not None), None)
        return path[-1] if path else None

    def _match(self, chain: HashChain, max_blocks: int) -> list[Node]:
        """Return the longest path of a history that the tier has."""
        return self.store.tree.match(chain, max_blocks)

    def hold(self, node: Node) -> None:
        self.store.tree.pin(node)
        if node.checkpoint is not None:
            self.store.start_reading(node.checkpoint)

    def release(self, node: Node, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            self.store.done_reading(checkpoint)
        self.store.unpin(node)

    def count_use(self, entry: Entry) -> None:
        if isinstance(entry, Checkpoint):
            self.store.resume(entry, None)
        else:
            self.store.count_hit(entry)

    def condemn(self, hashes: Iterable[BlockHash]) -> None:
        """Let these blocks, and all below them, never be found again, because their contents are wrong."""
        for block_hash in hashes:
            node = self.store.tree.find(block_hash)
            if node is not None:
                self.store.condemn(node)

    def reset(self) -> None:
        """Let nothing stored so far be found again."""
        self.store.reset()


class LateTier(Tier):
    """A tier whose copies end later than their plan. The worker then reports their tickets.

    A unit is read to a buffer of the worker, from where a later plan copies it to the arena.
    """

    def _set_reader(self, reader: TierReads, tickets: Iterator[int], clock: Callable[[], float]) -> None:
        """Set the reader and the record of writes. Constructors call this. `tickets` are those of all tiers."""
        self._reader, self._tickets, self._clock = reader, tickets, clock
        self._writing: dict[int, tuple[BlockHash, int]] = {}  # ticket -> hash and bytes
        self._unwritten_bytes = 0

    def _begin_write(self, entry: Entry, num_bytes: int) -> int:
        """Return the ticket of a write of an entry."""
        ticket = next(self._tickets)
        self._writing[ticket] = node_of(entry).hash, num_bytes
        self._unwritten_bytes += num_bytes
        return ticket

    def _end_write(self, ticket: int) -> BlockHash | None:
        """Forget a write that has ended and return its hash; None for a read that nobody waits for."""
        if ticket not in self._writing:
            return None
        block_hash, num_bytes = self._writing.pop(ticket)
        self._unwritten_bytes -= num_bytes
        return block_hash

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    @property
    def is_reading(self) -> bool:
        return self._reader.is_waiting

    def num_ready(self, entries: Sequence[Entry], *, is_busy: bool) -> int:
        return self._reader.num_ready(entries, is_busy=is_busy)

    def goes_on(self, left_bytes: int, start: int, end: int, *, is_busy: bool) -> bool:
        if self.choice is None:
            return True
        progress = self._reader.progress(left_bytes, is_busy=is_busy, has_rate=self.choice.has_rate)
        return progress is None or self.choice.goes_on(progress, start, end)

    def release(self, node: Node, checkpoint: Checkpoint | None) -> None:
        self._reader.end()
        super().release(node, checkpoint)

    def apply(self, report: TierReport) -> None:
        began_s, arrived = self._reader.answered_s, 0
        for ticket in report.done:
            if num_bytes := self._reader.arrive(ticket):
                arrived += num_bytes
            else:
                self._end_write(ticket)
        if self.choice is not None:
            self.choice.note_load(arrived, self._clock() - began_s)


class HostTier(Tier):
    """Keeps what the arena evicts in the host's memory."""

    name = "host"

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        moves: list[Move],
        policy: EvictionPolicy,
        cost: RecomputeCost,
        counters: CacheCounters,
        *,
        has_private: bool,
    ) -> None:
        arena = Arena(layout, num_pages, MoveRoute.HOST, moves)
        super().__init__(layout, arena, policy, cost, counters, has_private=has_private)
        self.skipped: Callable[[Entry], None] | None = None  # takes what this tier does not store

    def _send(self, entry: Entry, unit: int, route: MoveRoute) -> None:
        kind, src, num_bytes = unit_of(self.layout, entry)
        self.arena.moves.append(Move(kind, src, unit, route, windows=windows_of(entry)))
        self.counters.host_stored_bytes += num_bytes

    def _skip(self, entry: Entry) -> None:
        self.counters.host_skipped += 1
        if self.skipped is not None:
            self.skipped(entry)

    def load(self, entry: Entry, unit: int, windows: WindowRuns = ()) -> Move:
        kind, src, num_bytes = unit_of(self.layout, entry)
        self.counters.host_loaded_bytes += num_bytes
        return Move(kind, src, unit, MoveRoute.LOAD, windows=ids_of(windows))

    def fill(self, stats: CacheStats) -> None:
        stats.num_host_pages, stats.num_free_host_pages = self.arena.num_pages, self.arena.num_free_pages
        stats.num_host_blocks, stats.num_host_checkpoints = self.store.tree.num_nodes, self.store.num_checkpoints


def unit_of(layout: CacheLayout, entry: Entry) -> tuple[MoveKind, int, int]:
    """Return kind, unit and bytes of an entry."""
    if isinstance(entry, Node):
        return MoveKind.BLOCK, entry.block, layout.block_bytes
    return MoveKind.SLOT, entry.slot, layout.slot_bytes


def windows_of(entry: Entry) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of windows that an entry of the arena holds, for `Move.windows`."""
    return () if isinstance(entry, Node) else ids_of(entry.windows)
