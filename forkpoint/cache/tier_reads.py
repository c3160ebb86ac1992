"""Reads of a tier: units on their way from a tier to buffers of the worker, from where they go to the arena."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.cache.arena import Move, MoveKind, MoveRoute
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.load_choice import LoadProgress
from forkpoint.cache.tier_entries import LOADED_AT_ONCE
from forkpoint.cache.tree import Entry, Node
from forkpoint.cache.windows import WindowRuns, ids_of

PROBE_BYTES: Final = 4 * 2**20  # size of the first reads of a prefix, whose time shows early that a tier is slow
PROBE_GROWTH: Final = 4  # factor on the bytes that have arrived: that many are read next
AWAITED_BYTES: Final = 32 * 2**20  # the most bytes that a worker reports together


@dataclass(slots=True)
class TierRead:
    """A read of an entry."""

    entry: Entry
    num_bytes: int
    has_arrived: bool = False


class TierReads:
    """Starts reads in the order of a path, and knows which of them have arrived.

    A read ends later than the plan that starts it. The worker then reports its ticket. `moves` is the list of copies
    that all rooms share, and all tiers draw from the same `tickets`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        moves: list[Move],
        tickets: Iterator[int],
        most_bytes: int,
        clock: Callable[[], float],
        read: Callable[[Entry, int], Move],
    ) -> None:
        """`read` returns the move that reads an entry under a ticket.

        At most `most_bytes` are read at a time; a larger state is read alone.
        """
        self._layout, self._moves, self._tickets = layout, moves, tickets
        self._most_bytes, self._read = most_bytes, read
        self._clock = clock
        self._reads: dict[int, TierRead] = {}  # by ticket; those whose contents have not been copied to the arena
        self._tickets_of: dict[Entry, int] = {}
        self._num_bytes = 0  # bytes of these reads
        self._num_awaited = 0  # reads that have not arrived
        self._num_arrived_bytes = 0  # bytes of the present prefix, since `_began_s`
        self._began_s = 0.0
        self._probes = False
        self.answered_s = 0.0  # when a read was reported last, or when the first of the present ones began

    @property
    def is_waiting(self) -> bool:
        """Whether the answer to a read is still to come."""
        return self._num_awaited > 0

    @property
    def waited_s(self) -> float:
        """For how long no read has been reported, while one is awaited."""
        return self._clock() - self.answered_s if self.is_waiting else 0.0

    def progress(self, left_bytes: int, *, is_busy: bool, has_rate: bool) -> LoadProgress | None:
        """Return how far the present prefix has come, of which `left_bytes` have not been copied to the arena.

        None before its first read, and while other requests run (`is_busy`): their steps delay all reports, and the
        time starts anew. Otherwise, and unless the tier's rate is known (`has_rate`), the first reads are short, so
        that a slow tier is noticed early.
        """
        self._probes = not is_busy and not has_rate
        if is_busy:
            self._begin()
        if is_busy or not self._reads:
            return None
        unarrived = sum(read.num_bytes for read in self._reads.values() if not read.has_arrived)
        awaited = min(unarrived, AWAITED_BYTES)
        rest = left_bytes - (self._num_bytes - unarrived) - awaited
        return LoadProgress(self._clock() - self._began_s, self._num_arrived_bytes, awaited, max(0, rest))

    def _begin(self) -> None:
        self._began_s, self._num_arrived_bytes = self._clock(), 0

    def num_ready(self, entries: Sequence[Entry], *, is_busy: bool) -> int:
        """Return how many of these entries, in order, have arrived, and start to read those that follow.

        `is_busy`: the plan has rows of other requests.
        """
        self.keep_only(set(entries))
        if not self._reads and not self._num_arrived_bytes:
            self._begin()
        most_bytes = self._most_bytes
        if self._probes:
            most_bytes = min(most_bytes, max(PROBE_BYTES, PROBE_GROWTH * self._num_arrived_bytes))
        if is_busy:
            most_bytes = min(most_bytes, self._num_bytes + LOADED_AT_ONCE)
        for entry in entries:
            if entry in self._tickets_of:
                continue
            num_bytes = self._layout.block_bytes if isinstance(entry, Node) else self._layout.slot_bytes
            if self._num_bytes and self._num_bytes + num_bytes > most_bytes:
                break
            if not self.is_waiting:
                self.answered_s = self._clock()
            ticket = next(self._tickets)
            self._moves.append(self._read(entry, ticket))
            self._reads[ticket] = TierRead(entry, num_bytes)
            self._tickets_of[entry] = ticket
            self._num_bytes += num_bytes
            self._num_awaited += 1
        return sum(1 for _ in itertools.takewhile(self._has_arrived, entries))

    def _has_arrived(self, entry: Entry) -> bool:
        ticket = self._tickets_of.get(entry)
        return ticket is not None and self._reads[ticket].has_arrived

    def arrive(self, ticket: int) -> int:
        """Note that a read has ended. Returns its bytes; 0 if the ticket is of no read that is wanted."""
        read = self._reads.get(ticket)
        if read is None:
            return 0
        self._num_awaited -= not read.has_arrived
        read.has_arrived = True
        self.answered_s = self._clock()
        self._num_arrived_bytes += read.num_bytes
        return read.num_bytes

    def entry_of(self, ticket: int) -> Entry | None:
        """Return the entry of a read; None if the ticket is of no read that is wanted."""
        read = self._reads.get(ticket)
        return None if read is None else read.entry

    def fail(self, ticket: int) -> Entry | None:
        """Forget a read that failed and return its entry; None if the ticket is of no read that is wanted."""
        if ticket not in self._reads:
            return None
        self.answered_s = self._clock()
        return self._end(ticket).entry

    def land(self, entry: Entry, unit: int, windows: WindowRuns = ()) -> Move:
        """Return the copy of a read entry to a unit of the arena, and of its blocks of windows to theirs."""
        ticket = self._tickets_of[entry]
        self._end(ticket)
        kind = MoveKind.BLOCK if isinstance(entry, Node) else MoveKind.SLOT
        return Move(kind, 0, unit, MoveRoute.LAND, ticket, windows=ids_of(windows))

    def end(self) -> None:
        """Give up all reads: the present prefix is not read any further."""
        self.keep_only(set())
        self._num_arrived_bytes = 0

    def keep_only(self, wanted: set[Entry]) -> None:
        """Give up the reads of other entries."""
        for entry, ticket in list(self._tickets_of.items()):
            if entry not in wanted:
                self._end(ticket)
                self._moves.append(Move(MoveKind.BLOCK, 0, 0, MoveRoute.DISCARD, ticket))

    def _end(self, ticket: int) -> TierRead:
        read = self._reads.pop(ticket)
        del self._tickets_of[read.entry]
        self._num_bytes -= read.num_bytes
        self._num_awaited -= not read.has_arrived
        return read
