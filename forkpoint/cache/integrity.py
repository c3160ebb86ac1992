"""The invariants of the cache. Tests check them after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from forkpoint.cache.arena import UnitOwner, UnitPool
from forkpoint.cache.layout import NO_BLOCK, NO_SLOT
from forkpoint.cache.lease import Lease
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.restoring import Restore
from forkpoint.cache.tier import Tier
from forkpoint.cache.tree import Checkpoint
from forkpoint.cache.windows import WindowBlock
from forkpoint.config import BLOCK_SIZE

Owned: TypeAlias = tuple[int, UnitOwner]


def check_integrity(cache: CacheManager, leases: Iterable[Lease]) -> None:
    """Raise AssertionError, naming what is off, unless each unit has one owner and the tree agrees with the leases.

    `leases` are those of all requests that hold anything.
    """
    leases = list(leases)
    arena, tree, layout = cache.arena, cache.store.tree, cache.layout
    arena.check_integrity()
    tree.check_integrity()
    nodes = list(tree.nodes())
    checkpoints = [node.checkpoint for node in nodes if node.checkpoint is not None]
    for lease in leases:
        assert lease.num_confirmed <= lease.num_planned, f"{lease.owner}: more tokens are confirmed than planned"
        table = lease.block_ids(0, lease.num_blocks)
        if layout.has_kv:
            distinct = len(set(table)) == len(table)
            assert NO_BLOCK not in table and distinct, f"{lease.owner}: holes in its table {table}"
    own: list[Owned] = [(block, lease) for lease in leases for block in lease.own_blocks.values()]
    if layout.has_kv:
        _check_owners(arena.blocks, [*own, *((node.block, node) for node in nodes)])
        assert cache.room.num_blocks_held == len(own) + tree.num_pinned
    else:
        assert not own and all(node.block == NO_BLOCK for node in nodes)
    _check_windows(cache, leases, checkpoints)
    current = cache.tiers.restoring.current
    running: list[Owned] = [(lease.slot, lease) for lease in leases if lease.slot != NO_SLOT]
    saving: list[Owned] = [(save.slot, save) for lease in leases for save in lease.saves]
    _check_owners(arena.slots, [*running, *saving, *((each.slot, each) for each in checkpoints)])
    num_read = sum(each.num_readers > 0 for each in checkpoints)
    assert cache.room.num_slots_held == len(running) + num_read, "a running slot or a reader was not counted"
    assert cache.store.num_checkpoints == len(checkpoints)
    assert all(each.num_tokens == each.node.depth * BLOCK_SIZE for each in checkpoints)
    pins = sum(node.pins for node in nodes) - sum(node.pins > 0 for node in nodes if node.depth > 1)
    holders = [lease.node for lease in leases if lease.node is not None]
    if current is not None:
        holders.append(current.node)
    held = sum(node.depth > 0 for node in holders)
    assert pins == held, f"{pins} pins for {held} holders"
    for tier in cache.tiers.all:
        _check_tier(tier, current if current is not None and current.source is tier else None)


def _check_windows(cache: CacheManager, leases: Iterable[Lease], checkpoints: Iterable[Checkpoint]) -> None:
    """Raise AssertionError unless the blocks of windows are held by requests and checkpoints as often as counted."""
    holders, busy = Counter[WindowBlock](), Counter[WindowBlock]()
    for lease in leases:
        for number, row in enumerate(lease.windows):
            group = cache.layout.windows[number]
            assert row.end >= lease.num_blocks, f"{lease.owner}: a hole at the end of its window"
            first = group.first_block(lease.first_position)
            assert row.start <= first, f"{lease.owner}: a block in its window was given back"
            holders.update(row.blocks)
            busy.update(row.blocks)
    for each in checkpoints:
        blocks = [block for run in each.windows for block in run]
        firsts = [group.first_block(each.num_tokens) for group in cache.layout.windows]
        assert [len(run) for run in each.windows] == [each.node.depth - index for index in firsts]
        holders.update(blocks)
        if each.num_readers:
            holders.update(blocks)
            busy.update(blocks)
    assert all((each.num_holders, each.num_busy) == (holders[each], busy[each]) for each in holders), "holders are off"
    for number, pool in enumerate(cache.arena.windows):
        _check_owners(pool, [(each.block, each) for each in holders if each.window == number])
        assert cache.store.windows.num_busy[number] == sum(each.window == number for each in busy)


def _check_tier(tier: Tier, current: Restore | None) -> None:
    """Raise AssertionError unless the tier's units have one owner, and a restore alone holds something of it."""
    arena, tree = tier.arena, tier.store.tree
    arena.check_integrity()
    tree.check_integrity()
    nodes = list(tree.nodes())
    checkpoints = [node.checkpoint for node in nodes if node.checkpoint is not None]
    if tier.layout.has_kv:
        _check_owners(arena.blocks, [(node.block, node) for node in nodes])
    _check_owners(arena.slots, [(each.slot, each) for each in checkpoints])
    assert tier.store.num_checkpoints == len(checkpoints)
    busy = [each for each in checkpoints if each.num_readers]
    held: list[Checkpoint] = []
    if current is not None and current.end_checkpoint is not None:
        held.append(current.end_checkpoint)
    assert busy == held, "a state of a tier is busy, and no restore reads it"
    assert (tree.num_pinned > 0) == (current is not None), "a path of a tier is busy, and no restore reads it"


def _check_owners(pool: UnitPool, expected: Iterable[Owned]) -> None:
    owners: dict[int, UnitOwner] = {}
    for unit, owner in expected:
        other = owners.setdefault(unit, owner)
        kinds = type(other).__name__, type(owner).__name__
        assert other is owner, f"{pool.kind.value} {unit} is held by a {kinds[0]} and a {kinds[1]}"
    assert owners == pool.owners, f"the arena's {pool.kind.value} owners disagree with the tree and the leases"
