"""Copies of the host tier on streams that run late: contents are those of the same moves one after the other."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import pytest
import torch
from torch import Tensor

from forkpoint.cache.arena import Move, MoveKind, MoveRoute
from forkpoint.cache.layer_spec import KVSpec
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.tier_entries import HOST_READY
from forkpoint.platforms.copy_stream import PIECE_BYTES, pieces
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.host_copies import StreamCopies
from forkpoint.runtime.stretch import Stretch, joined, joint_padding
from forkpoint.runtime.units import unit_extent
from tests.cache.shapes import layout_of, state
from tests.late_streams import LatePlatform
from tests.sched.harness import LAYOUTS

NUM_PAGES, NUM_HOST_PAGES = 4, 5
KEYS = KVSpec.of(1, 2, 2, "float32")
SMALL = {
    "several blocks a page": layout_of([KEYS, state((2, 8), (4, 32, 32), "float32")]),
    "several slots a page": layout_of([KEYS] * 4 + [state((2, 8), (1, 4, 4), "float32")]),
    "padded blocks": layout_of([KEYS, KEYS, state((2, 8), (4, 24, 16), "float32")]),
    "two windows": layout_of(
        [KEYS, replace(KEYS, window=100), *[replace(KEYS, window=250)] * 2, state((2, 8), (4, 32, 32), "float32")]
    ),
}
Windows: TypeAlias = tuple[tuple[int, ...], ...]
T = TypeVar("T")


def words(data: Tensor) -> Tensor:
    """Return the bytes in words, which take an eighth of the time."""
    return data.view(torch.int64)


class Moving:
    """An arena and a host tier under random moves, next to what they must hold."""

    def __init__(self, layout: CacheLayout, seed: int, chance: float) -> None:
        self.random = random.Random(seed)
        self.platform = LatePlatform(seed, chance)
        self.arena = ArenaBuffer(layout, NUM_PAGES, self.platform, NUM_HOST_PAGES)
        self.layout, self.stored = layout, layout.in_tiers()
        self.window_sizes = [self.random.randint(0, group.most_of_state) for group in layout.windows]
        self.host: dict[tuple[MoveKind, int], Tensor] = {}
        self.reads: dict[int, tuple[MoveKind, Tensor]] = {}  # awaited ones
        self.arrived: list[int] = []
        self.last_ticket = HOST_READY
        self.num_landed = 0

    def unit(self, kind: MoveKind, pages: int) -> int:
        """Return a unit of a tier."""
        per_page = self.per_page(kind)
        return self.random.randrange(per_page, pages * per_page)

    def per_page(self, kind: MoveKind) -> int:
        return self.stored.blocks_per_page if kind is MoveKind.BLOCK else self.stored.slots_per_page

    def in_arena(self, kind: MoveKind) -> tuple[int, Windows]:
        """Return a unit of the arena, and for a state blocks of windows on other pages."""
        layout, pages = self.layout, self.random.sample(range(1, NUM_PAGES), NUM_PAGES - 1)
        per_page = layout.blocks_per_page if kind is MoveKind.BLOCK else layout.slots_per_page
        unit = pages[0] * per_page + self.random.randrange(per_page)
        if kind is MoveKind.BLOCK:
            return unit, ()
        windows = list[tuple[int, ...]]()
        for group, page, size in zip(layout.windows, pages[1:], self.window_sizes, strict=False):
            own = range(page * group.blocks_per_page, (page + 1) * group.blocks_per_page)
            windows.append(tuple(self.random.sample(own, size)))
        return unit, tuple(windows)

    def contents(self, kind: MoveKind, unit: int, windows: Windows) -> Tensor:
        """Return what a tier would hold of a unit: the unit, then the blocks of windows, with room for the most."""
        parts, num_bytes = [self.arena.data[unit_extent(self.arena.layout, kind, unit)]], self.stored.block_bytes
        if kind is MoveKind.SLOT:
            num_bytes = self.stored.slot_bytes
            for number, (group, blocks) in enumerate(zip(self.layout.windows, windows, strict=True), 1):
                parts += [
                    self.arena.data[unit_extent(self.arena.layout, MoveKind.BLOCK, block, number)] for block in blocks
                ]
                lacking = group.most_of_state - len(blocks)
                parts += [torch.zeros(lacking * group.unit_bytes, dtype=torch.uint8)]
        whole = torch.cat(parts)
        assert len(whole) == num_bytes
        return whole

    def ticket(self) -> int:
        self.last_ticket += 1
        return self.last_ticket

    def keep(self, room: dict[tuple[MoveKind, int], T], kind: MoveKind, unit: int, contents: T) -> None:
        """Note what a unit of a tier holds; the page's units of the other kind hold nothing any more."""
        for other, index in list(room):
            if other is not kind and index // self.per_page(other) == unit // self.per_page(kind):
                del room[other, index]
        room[kind, unit] = contents

    def move(self) -> Move:
        kind = self.random.choice([MoveKind.BLOCK, MoveKind.SLOT])
        known = sorted((each for each in self.host if each[0] is kind), key=lambda each: each[1])
        choice = self.random.random()
        if self.arrived and choice < 0.3:
            ticket = self.arrived.pop(self.random.randrange(len(self.arrived)))
            kind, contents = self.reads.pop(ticket)
            return self.landing(kind, ticket, contents)
        if known and choice < 0.55:
            source, ticket = self.random.choice(known)[1], self.ticket()
            self.reads[ticket] = kind, self.host[kind, source].clone()
            return Move(kind, source, 0, MoveRoute.LOAD_TO_BUFFER, ticket)
        if known and choice < 0.7:
            source, target = self.random.choice(known)[1], self.unit(kind, NUM_HOST_PAGES)
            self.keep(self.host, kind, target, self.host[kind, source])
            return Move(kind, source, target, MoveRoute.HOST)
        if self.reads and choice < 0.75:
            ticket = self.random.choice(sorted(self.reads))
            del self.reads[ticket]
            self.arrived = [each for each in self.arrived if each != ticket]
            return Move(MoveKind.BLOCK, 0, 0, MoveRoute.DISCARD, ticket)
        (source, windows), target = self.in_arena(kind), self.unit(kind, NUM_HOST_PAGES)
        self.keep(self.host, kind, target, self.contents(kind, source, windows))
        return Move(kind, source, target, MoveRoute.STORE, self.ticket(), windows=windows)

    def landing(self, kind: MoveKind, ticket: int, contents: Tensor) -> Move:
        unit, windows = self.in_arena(kind)
        move = Move(kind, 0, unit, MoveRoute.LAND, ticket, windows=windows)
        self.expected.append((move, contents))
        return move

    def plan(self) -> None:
        """Run some moves as a plan does, and then overwrite the arena as its rows do."""
        self.expected: list[tuple[Move, Tensor]] = []
        for _ in range(self.random.randint(0, 5)):
            # Run one by one what a plan runs together, because `move` looks at the arena; `issue` comes at the end.
            moves = self.with_neighbours(self.move())
            before = self.arena.data.clone()
            self.arena._note(moves)
            self.take_places(moves, before)
            assert torch.equal(words(self.arena.data), words(before)), "a copy to the arena reaches beyond its units"
            self.check_landed()
        self.arena._issue()
        words(self.arena.data).random_()
        self.platform.record_event()
        self.take_report()

    def with_neighbours(self, move: Move) -> list[Move]:
        """Return the move of a block and, at random, moves of the blocks that follow it, which copies may join."""
        moves, stored, own = [move], self.stored.blocks_per_page, self.layout.blocks_per_page
        while move.kind is MoveKind.BLOCK and self.random.random() < 0.6:
            src, dst = move.src + 1, move.dst + 1
            if move.route is MoveRoute.STORE and src < NUM_PAGES * own and dst < NUM_HOST_PAGES * stored:
                self.keep(self.host, MoveKind.BLOCK, dst, self.contents(MoveKind.BLOCK, src, ()))
                move = Move(MoveKind.BLOCK, src, dst, MoveRoute.STORE, self.ticket())
            elif move.route is MoveRoute.LOAD_TO_BUFFER and (MoveKind.BLOCK, src) in self.host:
                move = Move(MoveKind.BLOCK, src, 0, MoveRoute.LOAD_TO_BUFFER, self.ticket())
                self.reads[move.ticket] = MoveKind.BLOCK, self.host[MoveKind.BLOCK, src].clone()
            elif move.route is MoveRoute.LAND and dst < NUM_PAGES * own and move.ticket + 1 in self.arrived:
                kind, contents = self.reads[move.ticket + 1]
                if kind is not MoveKind.BLOCK:
                    break
                move = Move(kind, 0, dst, MoveRoute.LAND, move.ticket + 1)
                self.arrived.remove(move.ticket)
                del self.reads[move.ticket]
                self.expected.append((move, contents))
            else:
                break
            moves.append(move)
        return moves

    def take_places(self, moves: list[Move], before: Tensor) -> None:
        """Copy to `before` what these moves may write to the arena: units with the padding behind them."""
        places = list[slice]()
        for move in moves if moves[0].route is MoveRoute.LAND else ():
            start, end = (unit_extent(self.arena.layout, move.kind, unit).start for unit in (move.dst, move.dst + 1))
            places.append(slice(start, end))
            for number, blocks in enumerate(move.windows, 1):
                places += [unit_extent(self.arena.layout, MoveKind.BLOCK, block, number) for block in blocks]
        for place in places:
            before[place] = self.arena.data[place]

    def check_landed(self) -> None:
        for landed, contents in self.expected:
            found = self.contents(landed.kind, landed.dst, landed.windows)
            assert torch.equal(found, contents), "a restored unit has wrong bytes"
            self.num_landed += 1
        self.expected.clear()

    def take_report(self) -> None:
        report = self.arena.next_report(0.0)
        if report is not None:
            self.arrived += [ticket for ticket in report.done if ticket in self.reads]


@pytest.mark.parametrize("chance", [0.9, 0.99])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_late_copies_keep_the_order_of_the_moves(name: str, chance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if chance == 0.9:
        monkeypatch.setattr("forkpoint.runtime.host_copies.BATCH_BYTES", 3000)  # some units are issued before others
    for seed in range(2):
        moving = Moving(SMALL[name], seed, chance)
        for step in range(80):
            # Without memory for buffers, some copies are made at once.
            moving.platform.world.has_memory = seed == 0 or step % 3 > 0
            moving.plan()
        assert moving.num_landed > 5
        moving.arena.copies.close()
        for (kind, unit), contents in moving.host.items():
            assert torch.equal(moving.arena.host[unit_extent(moving.stored, kind, unit)], contents), "a unit is wrong"


def in_any_order(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy as a device may copy what one call names: here, the last copy first."""
    for target, source in reversed(list(zip(targets, sources, strict=True))):
        target.copy_(source)


@pytest.mark.parametrize("kinds", [(MoveKind.SLOT, MoveKind.BLOCK), (MoveKind.BLOCK, MoveKind.SLOT)])
def test_of_two_units_in_one_place_the_last_one_stays(
    kinds: tuple[MoveKind, MoveKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one plan a tier may evict what it has just stored, and a restore that is given up frees what it loaded."""
    monkeypatch.setattr("forkpoint.runtime.host_copies.copy_all", in_any_order)
    moving = Moving(SMALL["several blocks a page"], 0, 0.9)
    # Both lie in page 1. The block is not the first one, so that the units would be sorted.
    places = {MoveKind.BLOCK: moving.per_page(MoveKind.BLOCK) + 1, MoveKind.SLOT: moving.per_page(MoveKind.SLOT)}
    units = {kind: 2 * moving.per_page(kind) for kind in kinds}  # of page 2
    moving.arena.data.random_(0, 255)
    want = [moving.contents(kind, units[kind], ()) for kind in kinds]
    moving.arena.move([Move(kind, units[kind], places[kind], MoveRoute.STORE, moving.ticket()) for kind in kinds])
    moving.arena.copies.close()
    last = unit_extent(moving.stored, kinds[1], places[kinds[1]])
    assert torch.equal(moving.arena.host[last], want[1])
    tickets = [moving.ticket() for _ in kinds]
    for ticket, contents in zip(tickets, want, strict=True):
        assert isinstance(moving.arena.copies, StreamCopies)
        moving.arena.copies.copy_in(Stretch.of(contents), ticket)
    moving.arena.copies.issue()
    moving.platform.synchronize()
    moving.arena.move(
        [Move(kind, 0, places[kind], MoveRoute.LAND, ticket) for kind, ticket in zip(kinds, tickets, strict=True)]
    )
    assert torch.equal(moving.contents(kinds[1], places[kinds[1]], ()), want[1])


def test_copies_and_moves_of_a_plan_run_in_their_order() -> None:
    rng = random.Random(0)
    for layout in SMALL.values():
        arenas = [ArenaBuffer(layout, NUM_PAGES, CpuPlatform(), NUM_HOST_PAGES) for _ in range(2)]
        for arena in arenas:
            arena.data[:] = torch.arange(len(arena.data)) // 64 % 251
            arena.host.zero_()
        moves = list[Move]()
        for _ in range(60):
            kind, route = rng.choice([*MoveKind]), rng.choice([MoveRoute.ARENA, MoveRoute.STORE, MoveRoute.LOAD])
            own, stored = (
                each.blocks_per_page if kind is MoveKind.BLOCK else each.slots_per_page
                for each in (layout, layout.in_tiers())
            )
            sizes = {MoveRoute.ARENA: (own, own), MoveRoute.STORE: (own, stored), MoveRoute.LOAD: (stored, own)}[route]
            windows = tuple((group.blocks_per_page,) for group in layout.windows if kind is MoveKind.SLOT)
            units = (rng.randrange(per_page, NUM_PAGES * per_page) for per_page in sizes)
            moves.append(Move(kind, *units, route, windows=windows))
        arenas[0].move(moves)
        for move in moves:
            arenas[1].move([move])
        assert torch.equal(arenas[0].data, arenas[1].data) and torch.equal(arenas[0].host, arenas[1].host)


def test_memory_is_ready_once_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    platform = LatePlatform(0)
    monkeypatch.setattr(platform, "pin", lambda memory: pinned.append(memory.numel()))
    monkeypatch.setattr(platform, "unpin", lambda memory: pinned.pop())
    arena = ArenaBuffer(LAYOUTS["one each"], NUM_PAGES, platform, NUM_HOST_PAGES)
    assert arena.next_report() is None
    at_once = len(arena.host) // 3 + 1
    monkeypatch.setattr("forkpoint.runtime.host_copies.PINNED_AT_ONCE", at_once)
    arena.copies.start()
    while (report := arena.next_report()) is None:
        pass
    assert report.done == (HOST_READY,) and sum(pinned) == len(arena.host) and arena.host.data_ptr() % PIECE_BYTES == 0
    assert len(pinned) == 3 and max(pinned) <= at_once, "a large piece takes long, and may be refused as a whole"
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
    assert arena.next_report() is None


def test_copies_that_follow_each_other_are_joined() -> None:
    rng = random.Random(1)
    for _ in range(50):
        memories = [torch.randint(0, 255, (64,), dtype=torch.uint8) for _ in range(2)]
        targets = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
        copies = []
        for _ in range(rng.randrange(6)):
            source, target, start = rng.choice(memories), rng.choice(targets), 8 * rng.randrange(4)
            for number in range(rng.randint(1, 4)):
                begin = start + 8 * number
                copies.append((Stretch(target, begin, begin + 8), Stretch(source, begin + 8, begin + 16)))
        want = [target.clone() for target in targets]
        for target, source in copies:
            want[0 if target.memory is targets[0] else 1][target.start : target.end] = source.bytes
        found = list(joined(copies))
        assert sum(target.num_bytes for target, _ in found) == 8 * len(copies)
        for target, source in found:
            target.bytes.copy_(source.bytes)
        for (target, source), (next_target, next_source) in itertools.pairwise(found):
            follows = next_target.memory is target.memory and next_target.start == target.end
            assert not (follows and next_source.memory is source.memory and next_source.start == source.end)
        assert all(torch.equal(got, each) for got, each in zip(targets, want, strict=True))


@pytest.mark.parametrize(("gaps", "num_copies"), [((2, 2), 1), ((2, 1), 3), ((3, 3), 3)], ids=str)
def test_copies_with_the_same_padding_between_them_are_joined(gaps: tuple[int, int], num_copies: int) -> None:
    memories = [torch.arange(40, dtype=torch.uint8) for _ in gaps]
    units = [
        [Stretch(memory, first, first + 8) for first in range(0, 3 * (8 + gap), 8 + gap)]
        for memory, gap in zip(memories, gaps, strict=True)
    ]
    found = list(joined(zip(*units, strict=True), padding=2))
    assert len(found) == num_copies
    assert (found[0][0].start, found[-1][0].end) == (0, units[0][-1].end)


@pytest.mark.parametrize(
    ("arena", "tier", "smallest", "padding"),
    [((10, 8), (10, 8), 3, 2), ((10, 8), (10, 8), 2, 0), ((10, 8), (9, 8), 3, 0), (None, None, 3, 0)],
    ids=str,
)
def test_copies_span_no_gap_that_may_hold_a_unit(
    arena: tuple[int, int] | None, tier: tuple[int, int] | None, smallest: int, padding: int
) -> None:
    assert joint_padding(arena, tier, smallest) == padding


@pytest.mark.parametrize("address", [0, 64, PIECE_BYTES - 1])
def test_copies_are_cut_where_pieces_of_pinned_memory_end(address: int) -> None:
    found = list(pieces(address, 3 * PIECE_BYTES + 5))
    assert found[0][0] == 0 and found[-1][1] == 3 * PIECE_BYTES + 5
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(found))
    assert all((address + start) // PIECE_BYTES == (address + end - 1) // PIECE_BYTES for start, end in found)


@pytest.mark.parametrize("platform", [CpuPlatform(), LatePlatform(0)], ids=["at once", "streams"])
def test_memory_is_freed_with_the_arena(platform: CpuPlatform) -> None:
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
