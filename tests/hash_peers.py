"""Other engines for the hash runner: what one offers another fetches some results later, and some of it never comes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from forkpoint.cache.disk_entries import BLOCK
from forkpoint.sched.plan import Fetch, FetchNews, Move, MoveKind, MoveRoute
from tests.hash_memory import HashMemory
from tests.hash_step import require

Entries: TypeAlias = dict[tuple[MoveKind, bytes], Any]


@dataclass(slots=True)
class HashPeers:
    """One engine's link. `offered` is shared by all engines: what is held under each lease.

    Fetches end up to `most_delay` results later, and fail with `fail_chance`.
    """

    offered: dict[int, Entries] = field(default_factory=dict)
    most_delay: int = 0
    fail_chance: float = 0.0
    is_stuck: bool = False  # nothing ends
    random: random.Random = field(default_factory=lambda: random.Random(0))
    buffers: dict[int, list[tuple[MoveKind, Any]]] = field(default_factory=dict)  # by ticket
    _waiting: dict[int, tuple[int, bool]] = field(default_factory=dict)  # ticket -> results before it, whether it fails

    def move(self, step: int, move: Move, memory: HashMemory, sound: bool) -> None:
        match move.route:
            case MoveRoute.OFFER:
                assert move.name is not None
                require(not sound or memory.is_whole(move.kind, move.src), step, f"offers garbage of {move.src}")
                if sound:
                    entries = self.offered.setdefault(move.ticket, {})
                    entries[move.kind, move.name.hash] = memory.contents(move.kind, move.src)
            case MoveRoute.WITHDRAW:
                for lease, entries in list(self.offered.items()):
                    if move.name is None or any(key[1] == move.name.hash for key in entries):
                        del self.offered[lease]
            case MoveRoute.FETCHED:
                require(move.ticket not in self._waiting, step, "copies what has not arrived")
                kind, contents = self.buffers[move.ticket][move.src]
                require(kind is move.kind, step, f"copies a {kind.value} to a {move.kind.value}")
                memory.put(step, move.kind, move.dst, contents)
            case _:
                assert move.route is MoveRoute.FORGET
                self._waiting.pop(move.ticket, None)
                self.buffers.pop(move.ticket, None)

    def start(self, fetch: Fetch) -> None:
        entries = self.offered.get(fetch.lease, {})
        keys = [(MoveKind.BLOCK if name.kind == BLOCK else MoveKind.SLOT, name.hash) for name in fetch.names]
        if not keys:
            self.offered.pop(fetch.lease, None)
            return
        fails = not all(key in entries for key in keys) or self.random.random() < self.fail_chance
        if not fails:
            self.buffers[fetch.ticket] = [(kind, entries[kind, block_hash]) for kind, block_hash in keys]
        self._waiting[fetch.ticket] = self.random.randint(0, self.most_delay), fails

    def news(self, waits: bool) -> FetchNews | None:
        """Return the fetches that are due. With `waits` at least one of those that are left."""
        if self.is_stuck:
            return None
        self._waiting = {ticket: (left - 1, fails) for ticket, (left, fails) in self._waiting.items()}
        due = [ticket for ticket, (left, _) in self._waiting.items() if left < 0]
        if waits and not due:
            due = list(self._waiting)[:1]
        ended = {ticket: self._waiting.pop(ticket)[1] for ticket in due}
        if not ended:
            return None
        done = tuple(ticket for ticket, fails in ended.items() if not fails)
        return FetchNews(done, tuple(ticket for ticket, fails in ended.items() if fails))
