"""Evicted entries are remembered, a bounded number of them."""

from __future__ import annotations

from forkpoint.cache.ghosts import GhostKind, GhostTable
from forkpoint.cache.hashing import BlockHash


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_the_oldest_is_forgotten_first() -> None:
    table = GhostTable(2)
    table.add(name(1), GhostKind.KV)
    table.add(name(2), GhostKind.CHECKPOINT)
    table.add(name(1), GhostKind.CHECKPOINT)  # seen again: now the newest
    table.add(name(3), GhostKind.KV)
    assert [table.get(name(n)) for n in (1, 2, 3)] == [GhostKind.CHECKPOINT, None, GhostKind.KV]
    assert len(table) == 2


def test_what_is_cached_again_is_no_ghost() -> None:
    table = GhostTable(2)
    table.add(name(1), GhostKind.KV)
    table.discard(name(1))
    table.discard(name(7))
    assert table.get(name(1)) is None and len(table) == 0
    table.add(name(2), GhostKind.KV)
    table.clear()
    assert table.get(name(2)) is None


def test_no_room_for_any() -> None:
    table = GhostTable(0)
    table.add(name(1), GhostKind.KV)
    assert len(table) == 0
