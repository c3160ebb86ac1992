"""The prefix tree: matching, pins, condemned nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.cache.hashing import HashChain, chained_hashes, root_hash
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.tree import Checkpoint, Node, Origin, PrefixTree, nearest_checkpoint
from forkpoint.config import CacheConfig
from tests.cache.published import path_to
from tests.sched.harness import HYBRIDS, LAYOUTS, tokens

SIZE = 64


def chain(seed: int, blocks: int = 4, salt: str = "") -> HashChain:
    made = HashChain(salt)
    made.extend(tokens(seed, blocks * SIZE + 5))
    return made


def grow(tree: PrefixTree, source: HashChain, blocks: int) -> list[Node]:
    return tree.extend(tree.root(source.root), source.hashes[:blocks], source.blocks[:blocks], range(blocks))


def test_the_longest_match() -> None:
    tree, source = PrefixTree(), chain(1)
    nodes = grow(tree, source, 3)
    assert tree.match(source, 10) == nodes and tree.match(source, 2) == nodes[:2]
    assert tree.match(chain(2), 10) == []
    assert path_to(nodes[2]) == nodes and nodes[2].depth == 3
    tree.check_integrity()


def test_token_ids_are_compared_not_only_hashes() -> None:
    tree, source = PrefixTree(), chain(1)
    nodes = grow(tree, source, 3)
    nodes[1].tokens = b"x" * len(nodes[1].tokens)
    assert tree.match(source, 3) == nodes[:1]


@given(
    cached=st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), max_size=4),
    condemned=st.lists(st.integers(0, 23), max_size=2),
    asked=st.lists(st.sampled_from("ab"), max_size=7),
)
def test_a_history_has_the_same_hashes_whatever_the_tree_has_of_it(
    cached: list[list[str]], condemned: list[int], asked: list[str]
) -> None:
    tree, root, nodes = PrefixTree(), root_hash(""), list[Node]()
    for history in cached:
        blocks = [letter.encode() * SIZE * 4 for letter in history]
        hashes = chained_hashes(root, blocks)
        known = [node for node in map(tree.find, hashes) if node is not None]
        start, parent = len(known), known[-1] if known else tree.root(root)
        if start < len(blocks):
            nodes += tree.extend(parent, hashes[start:], blocks[start:], range(start, len(blocks)))
    for index in condemned:
        if index < len(nodes) and not nodes[index].condemned:
            tree.condemn(nodes[index])
    blocks = [letter.encode() * SIZE * 4 for letter in asked]
    assert tree.hash_history(root, blocks) == chained_hashes(root, blocks)


def test_a_private_block_lends_its_hash_to_nobody() -> None:
    layout = LAYOUTS[HYBRIDS[0]]
    cache = CacheManager(layout, 20, CacheConfig(), deterministic=True)
    ids = tokens(1, 2 * SIZE)
    own = cache.new_lease("a", "", ids[:100]).chain
    own.extend(ids[100:])
    cache.store.tree.extend(cache.store.tree.root(own.root), own.hashes, own.blocks, range(2))
    other = cache.new_lease("b", "", ids).chain
    assert other.hashes == chained_hashes(own.root, own.blocks) and other.hashes[1] != own.hashes[1]


def test_pins_reach_the_root_and_go_again() -> None:
    tree = PrefixTree()
    nodes = grow(tree, chain(1), 4)
    tree.pin(nodes[3])
    tree.pin(nodes[1])
    assert [node.pins for node in nodes] == [1, 2, 1, 1] and tree.num_pinned == 4
    tree.check_integrity()
    tree.unpin(nodes[3])
    assert [node.pins for node in nodes] == [1, 1, 0, 0] and tree.num_pinned == 2
    tree.unpin(nodes[1])
    assert tree.num_pinned == 0
    tree.check_integrity()


def test_a_pinned_node_cannot_be_removed() -> None:
    tree = PrefixTree()
    nodes = grow(tree, chain(1), 2)
    tree.pin(nodes[1])
    with pytest.raises(AssertionError):
        tree.remove(nodes[1])
    tree.unpin(nodes[1])
    with pytest.raises(AssertionError):
        tree.remove(nodes[0])  # it has a child
    tree.remove(nodes[1])
    tree.remove(nodes[0])
    assert tree.num_nodes == 0 and list(tree.nodes()) == []
    tree.check_integrity()


def test_a_leaf_goes_with_the_ancestors_that_nothing_else_needs() -> None:
    tree, source = PrefixTree(), chain(1, 6)
    nodes = grow(tree, source, 6)
    nodes[0].checkpoint = Checkpoint(nodes[0], 1, SIZE, Origin.JUNCTION, False)
    other = chain(2, 1)
    (branch,) = tree.extend(nodes[1], other.hashes, other.blocks, [9])
    assert tree.remove(nodes[5], most=2) == [nodes[5], nodes[4]] and all(node.removed for node in nodes[4:])
    tree.check_integrity()
    assert tree.remove(nodes[3], most=9) == [nodes[3], nodes[2]], "another history goes on from the next"
    assert tree.remove(branch, most=9) == [branch, nodes[1]], "the next has a checkpoint"
    assert tree.match(source, 9) == nodes[:1] and tree.num_nodes == 1
    tree.check_integrity()


def test_a_condemned_leaf_goes_with_condemned_ancestors() -> None:
    tree = PrefixTree()
    nodes = grow(tree, chain(1), 4)
    tree.condemn(nodes[2])
    assert tree.remove(nodes[3], most=4) == [nodes[3], nodes[2]]
    tree.check_integrity()


def test_the_nearest_checkpoint() -> None:
    tree, source = PrefixTree(), chain(1, 8)
    nodes = grow(tree, source, 7)
    assert nearest_checkpoint(nodes[6]) is None
    for index in (1, 4):
        node = nodes[index]
        node.checkpoint = Checkpoint(node, index, node.depth * SIZE, Origin.JUNCTION, False)
    assert [nearest_checkpoint(node) for node in nodes] == [
        None,
        *[nodes[1].checkpoint] * 3,
        *[nodes[4].checkpoint] * 3,
    ]
    tree.check_integrity()


def test_condemned_nodes_are_not_found_and_make_way_for_sound_ones() -> None:
    tree, source = PrefixTree(), chain(1)
    nodes = grow(tree, source, 4)
    tree.condemn(nodes[1])
    assert tree.match(source, 4) == nodes[:1] and tree.num_nodes == 4
    (fresh,) = tree.extend(nodes[0], source.hashes[1:2], source.blocks[1:2], [9])
    assert tree.match(source, 4) == [nodes[0], fresh]
    tree.check_integrity()
    for node in reversed(nodes[1:]):
        tree.remove(node)
    assert tree.match(source, 4) == [nodes[0], fresh]
    tree.check_integrity()


def test_an_unused_root_goes() -> None:
    tree = PrefixTree()
    root = tree.root(root_hash("a"))
    tree.pin(root)
    assert tree.root(root_hash("a")) is root
    tree.unpin(root)
    assert tree.root(root_hash("a")) is not root
