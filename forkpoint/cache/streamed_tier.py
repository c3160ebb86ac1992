"""The host tier of a device with memory of its own: copies run beside the steps and end later than their plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from forkpoint.cache.arena import Move, MoveRoute
from forkpoint.cache.counters import CacheCounters
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.load_choice import LoadChoice
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tier import HostTier, LateTier, unit_of, windows_of
from forkpoint.cache.tier_entries import BUFFERED_AT_ONCE, HOST_READY, STORED_AT_ONCE
from forkpoint.cache.tier_reads import TierReads
from forkpoint.cache.tree import Entry, node_of
from forkpoint.cache.windows import WindowRuns

AHEAD_AT_ONCE: Final = 64 * 2**20  # bytes that a plan stores before eviction asks for it
LOOKED_AHEAD: Final = 8  # entries that a plan looks at
# Count the pages that are free, and those that will be free once the entries before an entry are evicted. The entry is
# stored ahead if they are at most the pages of its path and 1 / 50 of the arena. While more than 1 / 8 of the arena is
# free, nothing is stored ahead.
RESERVE_SHARE, LARGEST_SHARE = 50, 8


class StreamedHostTier(LateTier, HostTier):
    """A host tier whose copies are reported by tickets.

    A plan copies a stored unit to a buffer of the device. The unit can be given out again at once, in the same plan. A
    stream copies the buffer to the host beside the steps. A loaded unit goes the same way back, so that a plan copies
    to the arena only units that have arrived. Nothing is stored before the worker has reported HOST_READY.
    """

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
        tickets: Iterator[int],
        clock: Callable[[], float],
    ) -> None:
        """`tickets` are those of all tiers."""
        super().__init__(layout, num_pages, moves, policy, cost, counters, has_private=has_private)
        self.is_ready = False
        self.stored_at_once = STORED_AT_ONCE
        self._set_reader(
            TierReads(layout, moves, tickets, BUFFERED_AT_ONCE, clock, self._load_to_buffer), tickets, clock
        )
        self.choice = self._choice = LoadChoice(cost, clock)

    def may_store(self, num_bytes: int) -> bool:
        return self.is_ready and self._unwritten_bytes + num_bytes <= self.stored_at_once

    def store_ahead(self, store: PrefixStore) -> None:
        """Store a part of what the arena's `store` evicts next, if its memory is nearly used up.

        A long prefix is thus stored over several plans, and nothing is left to copy when it is evicted. Entries that
        come later are stored too, because the next ones may be small.
        """
        num_pages, num_free = store.arena.num_pages, store.arena.num_free_pages
        if not self.is_ready or num_free > num_pages // LARGEST_SHARE:
            return
        left_bytes, page_bytes = AHEAD_AT_ONCE, store.layout.page_bytes
        for entry in store.next_victims(LOOKED_AHEAD):
            own_pages = node_of(entry).depth * self.layout.block_bytes // page_bytes
            if left_bytes <= 0 or num_free > num_pages // RESERVE_SHARE + own_pages:
                return
            if not self._can_do_without(entry):
                left_bytes -= self._store_part(entry, left_bytes)
            num_free += store.keys.freed_bytes(entry) // page_bytes

    def _store_part(self, entry: Entry, most_bytes: int) -> int:
        """Store about `most_bytes` of what the tier lacks of an entry's path, and return the bytes of it.

        The entry itself is stored with the last part. If the tier takes nothing, it counts as all, so that a plan does
        not walk the paths of other entries in vain.
        """
        node = node_of(entry)
        split = self._split(node)
        if split is None:
            return 0
        top, missing = split
        if not missing and (entry is node or top.checkpoint is not None):
            return 0
        block_bytes, count = self.layout.block_bytes, len(missing)
        if block_bytes:
            count = max(1, most_bytes // block_bytes)
        is_whole = len(missing) <= count
        self.store.tree.pin(top)
        is_stored = self._copy(top, missing[:count], entry, MoveRoute.STORE, is_whole=is_whole)
        self.store.unpin(top)
        if not is_stored:
            return most_bytes
        return len(missing[:count]) * block_bytes + (is_whole and entry is not node) * self.layout.slot_bytes

    def _send(self, entry: Entry, unit: int, route: MoveRoute) -> None:
        kind, src, num_bytes = unit_of(self.layout, entry)
        ticket = self._begin_write(entry, num_bytes)
        self.arena.moves.append(Move(kind, src, unit, route, ticket, windows=windows_of(entry)))
        self.counters.host_stored_bytes += num_bytes

    def _load_to_buffer(self, entry: Entry, ticket: int) -> Move:
        kind, unit, _ = unit_of(self.layout, entry)
        return Move(kind, unit, 0, MoveRoute.LOAD_TO_BUFFER, ticket)

    def is_open(self) -> bool:
        return not self._choice.is_closed

    def is_stalled(self) -> bool:
        return self._choice.is_late(max(BUFFERED_AT_ONCE, self.layout.slot_bytes), self._reader.waited_s)

    def load(self, entry: Entry, unit: int, windows: WindowRuns = ()) -> Move:
        self.counters.host_loaded_bytes += unit_of(self.layout, entry)[2]
        return self._reader.land(entry, unit, windows)

    def _end_write(self, ticket: int) -> BlockHash | None:
        self.is_ready = self.is_ready or ticket == HOST_READY
        return super()._end_write(ticket)
