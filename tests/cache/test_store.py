"""Two states for one node: which of them stays."""

from __future__ import annotations

import pytest

from forkpoint.cache.arena import Arena
from forkpoint.cache.eviction import RecomputeCost
from forkpoint.cache.hashing import HashChain
from forkpoint.cache.lease import StateSave
from forkpoint.cache.policies import EVICTION
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import Checkpoint, Node, Origin
from tests.sched.harness import HYBRIDS, LAYOUTS, tokens


@pytest.fixture
def store() -> PrefixStore:
    layout = LAYOUTS[HYBRIDS[0]]
    return PrefixStore(layout, Arena(layout, 50), EVICTION.find("cost")(), RecomputeCost(), 10)


def add_block(store: PrefixStore) -> Node:
    chain = HashChain("")
    chain.extend(tokens(1, 64))
    owner = StateSave(64, Origin.PROMPT_END)
    blocks = store.take_blocks(owner, 1)
    (node,) = store.add_blocks(store.tree.root(chain.root), chain.hashes, chain.blocks, blocks)
    return node


def save(store: PrefixStore, node: Node, decoded: bool, is_read: bool = False) -> Checkpoint | None:
    owner = StateSave(64, Origin.PROMPT_END)
    slot = store.take_slot(owner)
    assert slot is not None
    return store.add_checkpoint(node, slot, Origin.PROMPT_END, decoded, is_read=is_read)


@pytest.mark.parametrize("decoded", [False, True])
def test_a_second_state_of_the_same_kind_is_given_back(store: PrefixStore, decoded: bool) -> None:
    """The first one stays, with what is known of its use."""
    node = add_block(store)
    first = save(store, node, decoded)
    assert first is not None
    store.resume(first, None)
    assert save(store, node, decoded) is None
    assert node.checkpoint is first and first.num_hits == 1
    assert store.num_checkpoints == store.arena.slots.num_used == 1


def test_a_prefilled_state_replaces_a_decoded_one_that_nobody_reads(store: PrefixStore) -> None:
    node = add_block(store)
    read = save(store, node, True, is_read=True)
    assert read is not None and save(store, node, False) is None and node.checkpoint is read
    read.num_readers = 0
    better = save(store, node, False)
    assert better is not None and node.checkpoint is better and read.removed
    assert save(store, node, True) is None
    assert store.num_checkpoints == store.arena.slots.num_used == 1
