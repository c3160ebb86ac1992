"""Copies of the disk tier on streams that run late: contents are those of the same moves one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torch import Tensor

from forkpoint.cache.arena import Move, MoveKind, MoveRoute
from forkpoint.cache.tier_entries import BLOCK, SLOT, EntryName
from forkpoint.disk.store import open_store
from forkpoint.worker.disk import slab_layout
from tests.runtime.test_host_copies import SMALL, Moving

NUM_DISK_PAGES = 6
WAIT_S = 20.0


class MovingDisk(Moving):
    """A disk tier too. Each write has a name of its own."""

    def __init__(self, folder: Path, name: str, seed: int, chance: float) -> None:
        super().__init__(SMALL[name], seed, chance)
        slab = slab_layout(self.arena)
        store = open_store(folder, slab, NUM_DISK_PAGES * slab.page_bytes, b"n" * 16)
        assert store is not None
        self.arena.use_disk(store)
        self.disk: dict[tuple[MoveKind, int], tuple[EntryName, Tensor]] = {}
        self.of_disk: set[int] = set()  # tickets of reads
        self.bad: set[int] = set()  # tickets that fail
        self.writes: set[int] = set()

    def move(self) -> Move:
        choice = self.random.random()
        if choice < 0.5 or (self.arrived and choice < 0.6):
            return super().move()
        kind = self.random.choice([MoveKind.BLOCK, MoveKind.SLOT])
        known = sorted(unit for each, unit in self.disk if each is kind)
        in_host = sorted(unit for each, unit in self.host if each is kind)
        if choice < 0.75 and known:
            unit, ticket = self.random.choice(known), self.ticket()
            name, contents = self.disk[kind, unit]
            self.of_disk.add(ticket)
            if self.random.random() < 0.1:
                name = EntryName(name.kind, b"another's name  ", name.parent, name.depth)
                self.bad.add(ticket)
            else:
                self.reads[ticket] = kind, contents
            return Move(kind, unit, 0, MoveRoute.READ, ticket, name)
        if choice < 0.8 and known:
            source, target = self.random.choice(known), self.unit(kind, NUM_DISK_PAGES)
            if source != target:
                self.keep(self.disk, kind, target, self.disk[kind, source])
                self.disk.pop((kind, source), None)
                return Move(kind, source, target, MoveRoute.DISK)
        if choice < 0.83 and known:
            name, _ = self.disk.pop((kind, self.random.choice(known)))
            return Move(MoveKind.BLOCK, 0, 0, MoveRoute.REMOVE, name=name)
        target, ticket = self.unit(kind, NUM_DISK_PAGES), self.ticket()
        number = BLOCK if kind is MoveKind.BLOCK else SLOT
        name = EntryName(number, ticket.to_bytes(16, "little"), bytes(16), 1)
        self.writes.add(ticket)
        if in_host and self.random.random() < 0.5:
            source = self.random.choice(in_host)
            self.keep(self.disk, kind, target, (name, self.host[kind, source].clone()))
            return Move(kind, source, target, MoveRoute.HOST_TO_DISK, ticket, name)
        source, windows = self.in_arena(kind)
        self.keep(self.disk, kind, target, (name, self.contents(kind, source, windows)))
        return Move(kind, source, target, MoveRoute.ARENA_TO_DISK, ticket, name, windows=windows)

    def take_report(self, wait_s: float = 0.0) -> None:
        report = self.arena.next_report(wait_s)
        if report is None:
            return
        self.arrived += [ticket for ticket in report.done if ticket in self.reads]
        assert not self.bad.intersection(report.done), "another entry's contents were taken for a name"
        assert self.bad.issuperset(report.failed)
        self.writes.difference_update(report.done)

    def land_all(self) -> None:
        """Wait for all reads and look at what they brought."""
        until = time.monotonic() + WAIT_S
        while set(self.reads) - set(self.arrived) or self.writes:
            self.take_report(0.01)
            assert time.monotonic() < until, f"{set(self.reads) - set(self.arrived)}, {self.writes}"
        while self.arrived:
            ticket = self.arrived.pop()
            kind, contents = self.reads.pop(ticket)
            self.arena._note([self.landing(kind, ticket, contents)])
            self.check_landed()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_late_copies_keep_the_order_of_the_moves(name: str, tmp_path: Path) -> None:
    for seed, chance in enumerate((0.5, 0.9, 0.9, 0.99)):
        moving = MovingDisk(tmp_path / f"{seed}", name, seed, chance)
        for step in range(60):
            moving.platform.world.has_memory = seed % 2 == 0 or step % 3 > 0
            moving.plan()
        moving.land_all()
        assert moving.num_landed > 10
        moving.arena.close()


def test_a_write_of_a_step_that_failed_is_refused(tmp_path: Path) -> None:
    moving = MovingDisk(tmp_path, sorted(SMALL)[0], 0, 0.9)
    name = EntryName(SLOT, b"n" * 16, bytes(16), 1)
    unit = moving.layout.slots_per_page
    moving.arena.move([Move(MoveKind.SLOT, unit, unit, MoveRoute.ARENA_TO_DISK, 9, name)], sound=False)
    report = None
    while report is None:
        report = moving.arena.next_report(0.01)
    assert report.failed == (9,)
    moving.arena.close()
