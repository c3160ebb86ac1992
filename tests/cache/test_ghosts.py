"""Evicted entries are remembered, a bounded number of them."""

from __future__ import annotations

from forkpoint.cache.ghosts import GhostKind, GhostTable
from forkpoint.cache.hashing import BlockHash


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_the_oldest_is_forgotten_first() -> None:
    table = GhostTable(2)
    table.add([name(1)], GhostKind.KV)
    table.add([name(2)], GhostKind.CHECKPOINT)
    table.add([name(1)], GhostKind.CHECKPOINT)  # seen again: now the newest
    table.add([name(3)], GhostKind.KV)
    assert [table.get(name(n)) for n in (1, 2, 3)] == [GhostKind.CHECKPOINT, None, GhostKind.KV]
    assert len(table) == 2


def test_what_is_cached_again_is_no_ghost() -> None:
    table = GhostTable(2)
    table.add([name(1)], GhostKind.KV)
    table.discard([name(1), name(7)], GhostKind.KV)
    assert table.get(name(1)) is None and len(table) == 0
    table.add([name(2)], GhostKind.KV)
    table.clear()
    assert table.get(name(2)) is None


def test_many_at_once_are_as_many_one_by_one() -> None:
    at_once, one_by_one = GhostTable(3), GhostTable(3)
    at_once.add([name(n) for n in (1, 2, 3)], GhostKind.KV)
    at_once.add([name(n) for n in (1, 4, 5, 4)], GhostKind.CHECKPOINT)
    for n in (1, 2, 3):
        one_by_one.add([name(n)], GhostKind.KV)
    for n in (1, 4, 5, 4):
        one_by_one.add([name(n)], GhostKind.CHECKPOINT)
    found = [at_once.get(name(n)) for n in range(6)]
    assert found == [one_by_one.get(name(n)) for n in range(6)] and found.count(GhostKind.CHECKPOINT) == 3


def test_blocks_that_are_cached_again_still_miss_their_checkpoints() -> None:
    table = GhostTable(4)
    table.add([name(1), name(2)], GhostKind.KV)
    table.add([name(3)], GhostKind.CHECKPOINT)
    table.discard([name(1), name(3), name(9)], GhostKind.KV)
    assert [table.get(name(n)) for n in (1, 2, 3)] == [None, GhostKind.KV, GhostKind.CHECKPOINT]


def test_no_room_for_any() -> None:
    table = GhostTable(0)
    table.add([name(1)], GhostKind.KV)
    assert len(table) == 0
