"""Other engines for the hash runner: what one offers another fetches some results later, and some of it never comes."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from forkpoint.cache.tier_entries import BLOCK
from forkpoint.sched.plan import Fetch, FetchReport, Move, MoveKind, MoveRoute
from tests.hash_memory import HashMemory
from tests.hash_step import require

Entries: TypeAlias = dict[tuple[MoveKind, bytes], Any]


@dataclass(slots=True)
class HashPeers:
    """One engine's link. `offered` and `complete` are shared by all engines: what is held under each lease.

    With `engines`, by name, each has its own. Without the one that is asked, a fetch fails.
    Fetches end up to `most_delay` results later, and fail with `fail_chance`. Until then, results say how many of their
    first entries have arrived. An entry is lost with `lose_chance` while it is copied from the other device.
    """

    offered: dict[int, Entries] = field(default_factory=dict)
    most_delay: int = 0
    fail_chance: float = 0.0
    lose_chance: float = 0.0
    is_stuck: bool = False  # nothing ends
    random: random.Random = field(default_factory=lambda: random.Random(0))
    buffers: dict[int, list[tuple[MoveKind, Any]]] = field(default_factory=dict)  # by ticket
    _whole: dict[int, list[tuple[MoveKind, Any]]] = field(default_factory=dict)  # the same, once all has arrived
    complete: set[int] = field(default_factory=set)  # leases, of all engines
    _started: dict[int, Fetch] = field(default_factory=dict)  # by ticket; not decided
    _waiting: dict[int, tuple[int, bool]] = field(default_factory=dict)  # ticket -> results before it, whether it fails
    engines: dict[str, HashPeers] | None = None
    num_landed_early: int = 0  # entries that were copied before their fetch had ended

    def move(self, step: int, move: Move, memory: HashMemory, sound: bool) -> None:
        match move.route:
            case MoveRoute.OFFER if move.name is None:
                self.complete.add(move.ticket)
            case MoveRoute.WITHDRAW if move.ticket:
                self.offered.pop(move.ticket, None)
                self.complete.add(move.ticket)
            case MoveRoute.OFFER:
                assert move.name is not None
                require(not sound or memory.is_whole(move), step, f"offers garbage of {move.src}")
                if sound:
                    entries = self.offered.setdefault(move.ticket, {})
                    entries[move.kind, move.name.hash] = memory.contents(move)
            case MoveRoute.WITHDRAW:
                for lease, entries in list(self.offered.items()):
                    if move.name is None or any(key[1] == move.name.hash for key in entries):
                        del self.offered[lease]
                        self.complete.add(lease)
            case MoveRoute.FETCHED:
                kind, contents = self.entry(step, move.ticket, move.src)
                require(kind is move.kind, step, f"copies a {kind.value} to a {move.kind.value}")
                memory.put(step, move, contents)
            case _:
                assert move.route is MoveRoute.FORGET
                self._started.pop(move.ticket, None)
                self._waiting.pop(move.ticket, None)
                self.buffers.pop(move.ticket, None)
                self._whole.pop(move.ticket, None)

    def entry(self, step: int, ticket: int, place: int) -> tuple[MoveKind, Any]:
        """Return an entry of a fetch that a plan copies."""
        entries = self.buffers.get(ticket, [])
        require(place < len(entries), step, "copies what has not arrived")
        self.num_landed_early += ticket in (*self._waiting, *self._started)
        return entries[place]

    def loses(self) -> bool:
        """Decide whether an entry is written over while it is copied."""
        return self.random.random() < self.lose_chance

    def start(self, fetch: Fetch) -> None:
        if not fetch.names:
            source = self._source(fetch)
            source.offered.pop(fetch.lease, None)
            if self.engines is not None:
                source.complete.add(fetch.lease)
            return
        self._started[fetch.ticket] = fetch

    def _source(self, fetch: Fetch) -> HashPeers:
        """Return the link of the engine that is asked."""
        if self.engines is None:
            return self
        return self.engines.get(fetch.engine_id) or HashPeers(complete={fetch.lease})

    def _answer(self, fetch: Fetch) -> None:
        """Decide a fetch if its lease is complete or has ended. Let some of its first entries arrive."""
        source = self._source(fetch)
        entries = source.offered.get(fetch.lease, {})
        keys = [(MoveKind.BLOCK if name.kind == BLOCK else MoveKind.SLOT, name.hash) for name in fetch.names]
        there = [(kind, entries[kind, name]) for kind, name in itertools.takewhile(entries.__contains__, keys)]
        if fetch.lease in source.complete:
            del self._started[fetch.ticket]
            fails = len(there) < len(keys) or self.random.random() < self.fail_chance
            self._waiting[fetch.ticket] = self.random.randint(0, self.most_delay), fails
        arrived = self.buffers.setdefault(fetch.ticket, [])
        if len(there) > len(arrived):
            self.buffers[fetch.ticket] = there[: self.random.randint(len(arrived), len(there))]
        if len(there) >= len(arrived):  # the other engine may have withdrawn what has arrived
            self._whole[fetch.ticket] = there

    def next_report(self, waits: bool) -> FetchReport | None:
        """Return the fetches that are due. With `waits` at least one of those that are left."""
        if self.is_stuck:
            return None
        numbers = {ticket: len(entries) for ticket, entries in self.buffers.items()}
        for fetch in list(self._started.values()):
            self._answer(fetch)
        self._waiting = {ticket: (left - 1, fails) for ticket, (left, fails) in self._waiting.items()}
        due = [ticket for ticket, (left, _) in self._waiting.items() if left < 0]
        if waits and not due:
            due = list(self._waiting)[:1]
        ended = {ticket: self._waiting.pop(ticket)[1] for ticket in due}
        done = tuple(ticket for ticket, fails in ended.items() if not fails)
        for ticket in done:
            self.buffers[ticket] = self._whole.pop(ticket)
        grown = [(ticket, len(entries)) for ticket, entries in self.buffers.items() if ticket not in done]
        arrived = tuple((ticket, count) for ticket, count in grown if count > numbers.get(ticket, 0))
        if not ended and not arrived:
            return None
        return FetchReport(done, tuple(ticket for ticket, fails in ended.items() if fails), arrived=arrived)
