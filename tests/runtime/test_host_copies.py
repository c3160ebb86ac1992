"""Copies of the host tier on streams that run late: contents are those of the same moves one after the other."""

from __future__ import annotations

import gc
import itertools
import random
import weakref

import pytest
import torch
from torch import Tensor

from forkpoint.cache.arena import Move, MoveKind, MoveRoute
from forkpoint.cache.disk_entries import HOST_READY
from forkpoint.cache.layout import CacheLayout, KVSpec
from forkpoint.platforms.copy_stream import PIECE_BYTES, pieces
from forkpoint.runtime.buffers import ArenaBuffer
from tests.cache.shapes import layout_of, state
from tests.late_streams import LatePlatform
from tests.sched.harness import LAYOUTS

NUM_PAGES, NUM_HOST_PAGES = 4, 5
KEYS = KVSpec.of(1, 2, 2, "float32")
SMALL = {
    "several blocks a page": layout_of([KEYS, state((2, 8), (4, 32, 32), "float32")]),
    "several slots a page": layout_of([KEYS] * 4 + [state((2, 8), (1, 4, 4), "float32")]),
}


class Moving:
    """An arena and a host tier under random moves, next to what they must hold."""

    def __init__(self, layout: CacheLayout, seed: int, chance: float) -> None:
        self.random = random.Random(seed)
        self.platform = LatePlatform(seed, chance)
        self.arena = ArenaBuffer(layout, NUM_PAGES, self.platform, NUM_HOST_PAGES)
        self.layout = layout
        self.host: dict[tuple[MoveKind, int], Tensor] = {}
        self.reads: dict[int, tuple[MoveKind, Tensor]] = {}  # awaited ones
        self.arrived: list[int] = []
        self.last_ticket = HOST_READY
        self.num_landed = 0

    def unit(self, kind: MoveKind, pages: int) -> int:
        per_page = self.layout.blocks_per_page if kind is MoveKind.BLOCK else self.layout.slots_per_page
        return self.random.randrange(per_page, pages * per_page)

    def contents(self, kind: MoveKind, unit: int) -> Tensor:
        return self.arena.data[self.arena._extent(kind, unit)]

    def ticket(self) -> int:
        self.last_ticket += 1
        return self.last_ticket

    def keep(self, kind: MoveKind, unit: int, contents: Tensor) -> None:
        """Note what a unit of the host holds; the page's units of the other kind hold nothing any more."""
        page = self.arena._extent(kind, unit).start // self.layout.page_bytes
        for other, index in list(self.host):
            if other is not kind and self.arena._extent(other, index).start // self.layout.page_bytes == page:
                del self.host[other, index]
        self.host[kind, unit] = contents

    def move(self) -> Move:
        kind = self.random.choice([MoveKind.BLOCK, MoveKind.SLOT])
        known = sorted((each for each in self.host if each[0] is kind), key=lambda each: each[1])
        choice = self.random.random()
        if self.arrived and choice < 0.3:
            ticket = self.arrived.pop(self.random.randrange(len(self.arrived)))
            kind, contents = self.reads.pop(ticket)
            return self.land(Move(kind, 0, self.unit(kind, NUM_PAGES), MoveRoute.LAND, ticket), contents)
        if known and choice < 0.55:
            source, ticket = self.random.choice(known)[1], self.ticket()
            self.reads[ticket] = kind, self.host[kind, source].clone()
            return Move(kind, source, 0, MoveRoute.FETCH, ticket)
        if known and choice < 0.7:
            source, target = self.random.choice(known)[1], self.unit(kind, NUM_HOST_PAGES)
            self.keep(kind, target, self.host[kind, source])
            return Move(kind, source, target, MoveRoute.HOST)
        if self.reads and choice < 0.75:
            ticket = self.random.choice(sorted(self.reads))
            del self.reads[ticket]
            self.arrived = [each for each in self.arrived if each != ticket]
            return Move(MoveKind.BLOCK, 0, 0, MoveRoute.DISCARD, ticket)
        source, target = self.unit(kind, NUM_PAGES), self.unit(kind, NUM_HOST_PAGES)
        self.keep(kind, target, self.contents(kind, source).clone())
        return Move(kind, source, target, MoveRoute.STORE, self.ticket())

    def land(self, move: Move, contents: Tensor) -> Move:
        self.expected.append((move, contents))
        return move

    def plan(self) -> None:
        """Run some moves as a plan does, and then overwrite the arena as its rows do."""
        self.expected: list[tuple[Move, Tensor]] = []
        for _ in range(self.random.randint(0, 5)):
            # Run one by one what a plan runs together, because `move` looks at the arena; `issue` comes at the end.
            move = self.move()
            assert self.arena.copies.run(move)
            for landed, contents in self.expected:
                assert torch.equal(self.contents(landed.kind, landed.dst), contents), "a restored unit has wrong bytes"
                self.num_landed += 1
            self.expected.clear()
        self.arena.copies.issue()
        self.arena.data.random_(0, 255)
        self.platform.mark()
        news = self.arena.news(0.0)
        if news is not None:
            self.arrived += [ticket for ticket in news.done if ticket in self.reads]


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("chance", [0.9, 0.99])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_late_copies_keep_the_order_of_the_moves(
    name: str, chance: float, has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chance == 0.9:
        monkeypatch.setattr("forkpoint.runtime.host_copies.BATCH_BYTES", 3000)  # some units are issued before others
    for seed in range(4):
        moving = Moving(SMALL[name], seed, chance)
        for step in range(80):
            # Without memory for buffers, some copies are made at once.
            moving.platform.world.has_memory = has_memory or step % 3 > 0
            moving.plan()
        assert moving.num_landed > 5
        moving.arena.copies.close()
        for (kind, unit), contents in moving.host.items():
            assert torch.equal(moving.arena.host[moving.arena._extent(kind, unit)], contents), "a stored unit is wrong"


def test_memory_is_ready_once_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    platform = LatePlatform(0)
    monkeypatch.setattr(platform, "pin", lambda memory: pinned.append(memory.numel()))
    monkeypatch.setattr(platform, "unpin", lambda memory: pinned.pop())
    arena = ArenaBuffer(LAYOUTS["one each"], NUM_PAGES, platform, NUM_HOST_PAGES)
    assert arena.news() is None
    arena.copies.start()
    while (news := arena.news()) is None:
        pass
    assert news.done == (HOST_READY,) and sum(pinned) == len(arena.host) and arena.host.data_ptr() % PIECE_BYTES == 0
    arena.close()
    assert not pinned


def test_memory_that_cannot_be_pinned_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = LatePlatform(0)

    def refuse(memory: Tensor) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(platform, "pin", refuse)
    arena = ArenaBuffer(LAYOUTS["one each"], NUM_PAGES, platform, NUM_HOST_PAGES)
    arena.copies.start()
    arena.close()  # waits for the thread
    assert arena.news() is None


@pytest.mark.parametrize("address", [0, 64, PIECE_BYTES - 1])
def test_copies_are_cut_where_pieces_of_pinned_memory_end(address: int) -> None:
    found = list(pieces(address, 3 * PIECE_BYTES + 5))
    assert found[0][0] == 0 and found[-1][1] == 3 * PIECE_BYTES + 5
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(found))
    assert all((address + start) // PIECE_BYTES == (address + end - 1) // PIECE_BYTES for start, end in found)


@pytest.mark.parametrize("platform", [None, LatePlatform(0)], ids=["at once", "streams"])
def test_memory_is_freed_with_the_arena(platform: LatePlatform | None) -> None:
    """No cycle keeps it until the next collection of garbage: another engine may need the memory at once."""
    arena = ArenaBuffer(LAYOUTS["one each"], NUM_PAGES, platform, NUM_HOST_PAGES)
    arena.copies.start()
    arena.close()
    data = weakref.ref(arena.data)
    gc.disable()
    try:
        del arena
        assert data() is None
    finally:
        gc.enable()
