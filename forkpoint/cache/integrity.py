"""The invariants of the cache, checked after every step in tests."""

from __future__ import annotations

from collections.abc import Iterable

from forkpoint.cache.layout import NO_BLOCK, NO_SLOT
from forkpoint.cache.lease import Lease, PendingSave
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.tree import Checkpoint, Node


def check_integrity(manager: CacheManager, leases: Iterable[Lease]) -> None:
    """Every page, block and slot has exactly one kind of owner; checkpoints and pins agree with the tree.

    `leases` are those of all requests that hold anything. Raises AssertionError naming what is off.
    """
    leases = list(leases)
    arena, tree = manager.arena, manager.store.tree
    arena.check_integrity()
    tree.check_integrity()
    nodes = list(tree.nodes())
    _check_blocks(manager, nodes, leases)
    _check_slots(manager, nodes, leases)
    pins = sum(node.pins for node in nodes) - sum(node.pins > 0 for node in nodes if node.depth > 1)
    held = sum(lease.node is not None and lease.node.depth > 0 for lease in leases)
    assert pins == held, f"{pins} pins for {held} leases"


def _check_blocks(manager: CacheManager, nodes: list[Node], leases: list[Lease]) -> None:
    pool = manager.arena.blocks
    if pool is None:
        assert all(node.block == NO_BLOCK for node in nodes)
        return
    expected: dict[int, object] = {node.block: node for node in nodes}
    assert len(expected) == len(nodes), "two nodes share a block"
    for lease in leases:
        for block in lease.own_blocks.values():
            assert block not in expected, f"block {block} of {lease.owner} has two owners"
            expected[block] = lease
        assert lease.num_confirmed <= lease.num_planned, f"{lease.owner}: more tokens are confirmed than planned"
        table = lease.block_ids(0, lease.num_blocks)
        assert NO_BLOCK not in table and len(set(table)) == len(table), f"{lease.owner}: holes in its table {table}"
    assert expected == pool.owners, "the arena's block owners disagree with the tree and the leases"
    own = sum(len(lease.own_blocks) for lease in leases)
    assert manager.holdings.num_blocks == own + sum(node.pins > 0 for node in nodes)


def _check_slots(manager: CacheManager, nodes: list[Node], leases: list[Lease]) -> None:
    pool = manager.arena.slots
    if pool is None:
        return
    checkpoints = [node.checkpoint for node in nodes if node.checkpoint is not None]
    held: dict[int, str] = {}

    def hold(slot: int, name: str) -> None:
        assert slot not in held, f"slot {slot} is held by {held[slot]} and by {name}"
        held[slot] = name

    for checkpoint in checkpoints:
        hold(checkpoint.slot, f"checkpoint at {checkpoint.num_tokens}")
        assert pool.owners.get(checkpoint.slot) is checkpoint
        assert checkpoint.num_tokens == checkpoint.node.depth * manager.layout.block_size
    for lease in leases:
        if lease.slot != NO_SLOT:
            hold(lease.slot, f"running {lease.owner}")
            assert pool.owners[lease.slot] is lease
        for save in lease.pending:
            hold(save.slot, f"pending save of {lease.owner}")
    assert held.keys() == pool.owners.keys(), "the arena's slot owners disagree with the tree and the leases"
    kinds = (Checkpoint, Lease, PendingSave)
    assert all(isinstance(owner, kinds) for owner in pool.owners.values())
    assert manager.store.num_checkpoints == len(checkpoints)
    assert manager.holdings.running_slots == sum(lease.slot != NO_SLOT for lease in leases)
    assert manager.holdings.read_slots == sum(c.num_readers > 0 for c in checkpoints), "a reader was not counted"
