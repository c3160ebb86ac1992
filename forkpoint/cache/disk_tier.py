"""The disk tier: cache entries that left the arena or the host tier, in a file that outlives the process."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from forkpoint.cache.arena import Arena, Move, MoveKind, MoveRoute
from forkpoint.cache.counters import CacheCounters, CacheStats
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.hashing import BlockHash, HashChain
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.load_choice import TRY_AGAIN_S, LoadChoice
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tier import LateTier, unit_of, windows_of
from forkpoint.cache.tier_entries import BLOCK, SLOT, DiskFacts, EntryName, TierReport, window_at
from forkpoint.cache.tier_reads import TierReads
from forkpoint.cache.tree import Entry, Node, Origin, node_of
from forkpoint.cache.windows import WindowRuns
from forkpoint.quick_imports import collection_paused

READ_AT_ONCE: Final = 128 * 2**20  # bytes that the worker reads ahead into buffers; a larger state is read alone
UNWRITTEN_AT_ONCE: Final = 256 * 2**20  # bytes that wait to be written; what is evicted meanwhile is not stored
STALLED_S: Final = 20.0  # seconds without an answer to a read, after which nothing is read for TRY_AGAIN_S
ORIGINS: Final = tuple(Origin)  # a record's `origin` is an index of it
LOGGER: Final = logging.getLogger("forkpoint")


class DiskTier(LateTier):
    """Keeps what the room above evicts on a disk, which a thread of the worker reads and writes.

    Its nodes have no tokens: their hashes alone name them. A failed write or read removes its
    entry. After a failed write nothing is stored any more. A disk that does not answer for STALLED_S,
    perhaps because the whole process was stopped, is read again once it has answered and TRY_AGAIN_S have passed.
    """

    name = "disk"

    def __init__(
        self,
        layout: CacheLayout,
        facts: DiskFacts,
        moves: list[Move],
        policy: EvictionPolicy,
        cost: RecomputeCost,
        counters: CacheCounters,
        *,
        has_private: bool,
        tickets: Iterator[int],
        write_limit: int,
        weighs_loads: bool,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """At most `write_limit` bytes are written in a day. `tickets` are those of all tiers.

        With `weighs_loads`, a prefix is read only if that is faster than computing.
        """
        arena = Arena(layout, facts.num_pages, MoveRoute.DISK, moves)
        super().__init__(layout, arena, policy, cost, counters, has_private=has_private)
        self.writes = True
        self._has_answered = True  # whether the disk has answered since a read had no answer for STALLED_S
        self._closed_until_s = -math.inf
        self._write_limit = write_limit
        self._wall_clock = wall_clock
        self._window_start_s, self._window_bytes = facts.window_start_s, facts.window_bytes
        self._set_reader(TierReads(layout, moves, tickets, READ_AT_ONCE, clock, self._read), tickets, clock)
        if weighs_loads:
            self.choice = LoadChoice(cost, clock)
        self._load(facts)

    @collection_paused()  # hundreds of thousands of objects that all stay
    def _load(self, facts: DiskFacts) -> None:
        """Take in the entries of earlier processes. An entry without all blocks before it is left out."""
        self._load_blocks(facts)
        self._load_checkpoints(facts)

    def _load_blocks(self, facts: DiskFacts) -> None:
        records = facts.entries[facts.entries["kind"] == BLOCK]
        records = records[records["depth"].argsort(kind="stable")]
        columns = (records[name].tolist() for name in ("unit", "depth", "hash", "parent"))
        owners = self.store.tree.extend_many(zip(*columns, strict=True))
        self.arena.occupy(MoveKind.BLOCK, owners)
        for node in owners.values():
            if not node.children:
                self.store.touch(node)

    def _load_checkpoints(self, facts: DiskFacts) -> None:
        records = facts.entries[facts.entries["kind"] == SLOT]
        columns = (records[name].tolist() for name in ("unit", "depth", "hash", "parent", "origin", "decoded"))
        found, named = dict[int, tuple[Node, Origin, bool]](), set[Node]()
        for unit, depth, block_hash, parent_hash, origin, decoded in zip(*columns, strict=True):
            node = self.store.tree.find(block_hash)
            if node is None and depth and origin < len(ORIGINS) and not self.layout.has_kv:
                node = self.store.tree.add_end(depth, block_hash, parent_hash)  # it needs no blocks before it
            if node is not None and node.depth == depth and origin < len(ORIGINS) and node not in named:
                named.add(node)
                found[unit] = node, ORIGINS[origin], bool(decoded)
        self.arena.occupy(MoveKind.SLOT, {unit: node for unit, (node, _, _) in found.items()})
        for unit, (node, kind, decoded) in found.items():
            self.store.load_checkpoint(node, unit, kind, decoded)

    # --- storing

    def save(self, store: PrefixStore, route: MoveRoute) -> None:
        """Store a room's entries, the most valuable first, until UNWRITTEN_AT_ONCE / 2 bytes wait to be written.

        `route` leads here from that room. Nothing is stored after a failed write.
        """
        for entry in store.by_worth():
            if not self.writes or self._unwritten_bytes > UNWRITTEN_AT_ONCE // 2:
                break
            self.keep(entry, route)

    def may_store(self, num_bytes: int) -> bool:
        self._window_start_s, self._window_bytes = window_at(
            self._wall_clock(), self._window_start_s, self._window_bytes
        )
        is_calm = not self._unwritten_bytes or self._unwritten_bytes + num_bytes <= UNWRITTEN_AT_ONCE
        return self.writes and is_calm and self._window_bytes + num_bytes <= self._write_limit

    def _send(self, entry: Entry, unit: int, route: MoveRoute) -> None:
        kind, src, num_bytes = unit_of(self.layout, entry)
        ticket = self._begin_write(entry, num_bytes)
        self.arena.moves.append(Move(kind, src, unit, route, ticket, name_of(entry), windows=windows_of(entry)))
        self.counters.disk_stored_bytes += num_bytes
        self._window_bytes += num_bytes

    def _skip(self, entry: Entry) -> None:
        self.counters.disk_skipped += 1

    def _tokens(self, node: Node) -> bytes:
        return b""

    # --- restoring

    def _match(self, chain: HashChain, max_blocks: int) -> list[Node]:
        path: list[Node] = []
        if not self.is_open():
            return path
        find = self.store.tree.find
        for block_hash in chain.hashes[:max_blocks]:
            node = find(block_hash)
            if node is not None:
                path.append(node)
            elif self.layout.has_kv:  # without blocks, the nodes of earlier processes are ends of paths alone
                break
        return path

    def _read(self, entry: Entry, ticket: int) -> Move:
        kind, unit, _ = unit_of(self.layout, entry)
        return Move(kind, unit, 0, MoveRoute.READ, ticket, name_of(entry))

    def is_open(self) -> bool:
        return self._has_answered and self._clock() >= self._closed_until_s

    def is_stalled(self) -> bool:
        """Return whether nothing is read now, because a read had no answer for STALLED_S."""
        if self._reader.waited_s > STALLED_S:
            LOGGER.warning(
                "disk tier: the disk did not answer for %g s; it is not read until it has answered, and for at least "
                "%g s",
                STALLED_S,
                TRY_AGAIN_S,
            )
            self._has_answered, self._closed_until_s = False, self._clock() + TRY_AGAIN_S
        return not self.is_open()

    def load(self, entry: Entry, unit: int, windows: WindowRuns = ()) -> Move:
        self.counters.disk_loaded_bytes += unit_of(self.layout, entry)[2]
        return self._reader.land(entry, unit, windows)

    # --- what the worker reports

    def apply(self, report: TierReport) -> None:
        """Take in what the worker's disk has done. Entries whose read or write failed are condemned."""
        self.writes = self.writes and report.writes
        self._has_answered = self._has_answered or bool(report.done or report.failed)
        super().apply(report)
        for ticket in report.failed:
            entry = self._reader.fail(ticket)
            if entry is not None:
                self.counters.disk_failed_reads += 1
                self.condemn([node_of(entry).hash])
            elif (block_hash := self._end_write(ticket)) is not None:
                self.counters.disk_failed_writes += 1
                self.condemn([block_hash])

    # --- removing

    @property
    def has_unsent(self) -> bool:
        """Whether there are entries to remove that no plan has carried yet."""
        return any(move.route is MoveRoute.REMOVE for move in self.arena.moves)

    def condemn(self, hashes: Iterable[BlockHash]) -> None:
        hashes = list(hashes)
        super().condemn(hashes)
        # An entry that the tree has evicted may still be in the journal. The worker finds it by its hash.
        self.arena.moves += [
            Move(MoveKind.BLOCK, 0, 0, MoveRoute.REMOVE, name=EntryName(BLOCK, each, b"", 0)) for each in hashes
        ]

    def reset(self) -> None:
        super().reset()
        self.arena.moves.append(Move(MoveKind.BLOCK, 0, 0, MoveRoute.REMOVE))

    def fill(self, stats: CacheStats) -> None:
        stats.num_disk_pages, stats.num_free_disk_pages = self.arena.num_pages, self.arena.num_free_pages
        stats.num_disk_blocks, stats.num_disk_checkpoints = self.store.tree.num_nodes, self.store.num_checkpoints


def name_of(entry: Entry) -> EntryName:
    """Return the name of an entry."""
    node = node_of(entry)
    assert node.parent is not None
    place = (node.hash, node.parent.hash, node.depth)
    if isinstance(entry, Node):
        return EntryName(BLOCK, *place)
    return EntryName(SLOT, *place, ORIGINS.index(entry.origin), entry.decoded)
