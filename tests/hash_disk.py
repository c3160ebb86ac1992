"""A disk for the hash runner: what it is told to write can be read later, and some of it fails."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.tier_entries import EntryName
from forkpoint.sched.plan import Move, MoveKind, MoveRoute, TierReport
from tests.hash_memory import HashMemory
from tests.hash_step import require


@dataclass(slots=True)
class HashDisk:
    """Contents change in the order of the moves. Tickets are reported up to `most_delay` results later.

    Reads and writes fail with `fail_chance`; after a failed write all further ones fail.
    """

    layout: CacheLayout
    num_pages: int
    most_delay: int = 0
    fail_chance: float = 0.0
    writes: bool = True
    random: random.Random = field(default_factory=lambda: random.Random(0))
    num_failed: int = 0
    _memory: HashMemory = field(init=False)
    _names: dict[tuple[MoveKind, int], EntryName] = field(default_factory=dict)
    _buffers: dict[int, tuple[MoveKind, Any]] = field(default_factory=dict)
    _waiting: dict[int, tuple[int, bool]] = field(default_factory=dict)  # ticket -> results before it, whether it fails
    _reported: dict[int, bool] = field(default_factory=dict)  # ticket -> whether it failed

    def __post_init__(self) -> None:
        self._memory = HashMemory(self.layout, self.num_pages)

    def move(self, step: int, move: Move, rooms: dict[MoveRoute, HashMemory], sound: bool) -> None:
        """Run a move. `rooms` are the memories that the routes to the disk start from, and the arena under LAND."""
        kind, ticket = move.kind, move.ticket
        match move.route:
            case MoveRoute.READ:
                self._read(step, move)
            case MoveRoute.LOAD_TO_BUFFER:
                room = rooms[MoveRoute.LOAD_TO_BUFFER]
                is_right = room.is_whole(move) or not sound
                require(is_right, step, f"fetches {kind.value} {move.src}, which holds garbage")
                self.hold(ticket, kind, room.contents(move))
            case MoveRoute.LAND:
                arrived = self._reported.get(ticket) is False
                require(arrived, step, f"copies read {ticket}, which failed or was not reported")
                found, contents = self._buffers.pop(ticket)
                require(found is kind, step, f"copies a {found.value} to a {kind.value}")
                rooms[MoveRoute.LAND].put(step, move, contents)
            case MoveRoute.DISCARD:
                self._buffers.pop(ticket, None)
            case MoveRoute.REMOVE:
                wrong = [key for key, each in self._names.items() if move.name is None or each.hash == move.name.hash]
                for key in wrong:
                    del self._names[key]
            case MoveRoute.DISK:
                name = self._names.get((kind, move.src))
                self._memory.put(step, move, self._memory.contents(move))
                self._own(kind, move.dst, name)
            case _:
                self._write(step, move, rooms[move.route], sound)

    def hold(self, ticket: int, kind: MoveKind, contents: Any, fails: bool = False) -> None:
        """Put contents in a buffer of the device and report the ticket some results later."""
        self._buffers[ticket] = kind, contents
        self.wait(ticket, fails)

    def _read(self, step: int, move: Move) -> None:
        assert move.name is not None
        name = self._names.get((move.kind, move.src))
        is_there = name is not None and name.hash == move.name.hash
        require(is_there or self.num_failed > 0, step, f"reads {move.kind.value} {move.src}, which holds {name}")
        if is_there:
            self._buffers[move.ticket] = move.kind, self._memory.contents(move)
        fails = not is_there or self.random.random() < self.fail_chance
        self.num_failed += fails
        self.wait(move.ticket, fails)

    def _write(self, step: int, move: Move, room: HashMemory, sound: bool) -> None:
        self._memory.put(step, move, room.contents(move))
        self.writes = self.writes and self.random.random() >= self.fail_chance
        fails = not (self.writes and sound)
        self.num_failed += fails
        require(fails or room.is_whole(move), step, f"stores garbage of {move.kind.value} {move.src}")
        self._own(move.kind, move.dst, None if fails else move.name)
        self.wait(move.ticket, fails)

    def _own(self, kind: MoveKind, unit: int, name: EntryName | None) -> None:
        """Make a name that of a unit. The page's units of the other kind lose theirs."""
        per_page = {MoveKind.BLOCK: self.layout.blocks_per_page, MoveKind.SLOT: self.layout.slots_per_page}
        page = unit // per_page[kind]
        for other, index in list(self._names):
            if other is not kind and index // per_page[other] == page:
                del self._names[other, index]
        self._names.pop((kind, unit), None)
        if name is not None:
            self._names[kind, unit] = name

    def wait(self, ticket: int, fails: bool = False) -> None:
        """Report a ticket some results later."""
        require(ticket not in self._waiting and ticket not in self._reported, None, f"ticket {ticket} is used twice")
        self._waiting[ticket] = self.random.randint(0, self.most_delay), fails

    def next_report(self, waits: bool) -> TierReport | None:
        """Return the tickets that are due. With `waits` at least one of those that are left."""
        self._waiting = {ticket: (left - 1, fails) for ticket, (left, fails) in self._waiting.items()}
        due = [ticket for ticket, (left, _) in self._waiting.items() if left < 0]
        if waits and not due:
            due = list(self._waiting)[:1]
        ended = {ticket: self._waiting.pop(ticket)[1] for ticket in due}
        self._reported |= ended
        if not due:
            return None
        done = tuple(ticket for ticket, fails in ended.items() if not fails)
        return TierReport(done, tuple(ticket for ticket, fails in ended.items() if fails), self.writes)
