"""The prefix tree: one node per block of 64 tokens, keys and values always, a checkpoint here and there."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from forkpoint.cache.arena import Move
from forkpoint.cache.hashing import BlockHash, HashChain
from forkpoint.cache.layout import NO_BLOCK


@enum.unique
class Origin(enum.StrEnum):
    """Why something is kept: the first ones, the most valuable first, are why a checkpoint was taken; the others are
    what a policy may learn apart."""

    JUNCTION = "junction"  # seen in the tree, or among waiting prompts: others came here and parted
    PROMPT_END = "prompt_end"
    DECODE = "decode"  # the last boundary of an answer
    BREAKPOINT = "breakpoint"
    NEAR_END = "near_end"  # for prompts whose last words (who speaks next, a reminder) the next turn does not repeat
    FALLBACK = "fallback"  # inside prompts that fill much of the arena: what is left when their end is evicted
    INTERVAL = "interval"
    TOOL_CALL = "tool_call"  # the end of a conversation whose answer calls a tool
    SUPERSEDED = "superseded"  # the end of an earlier turn
    BLOCK = "block"  # keys and values alone, of models without states

    __hash__ = str.__hash__  # Enum's own is a Python call, and these are counted a lot


TURN_ENDS = (Origin.PROMPT_END, Origin.DECODE)  # a conversation goes on from these
OF_CONVERSATION = (*TURN_ENDS, Origin.FALLBACK)
INSIDE_PROMPTS = (Origin.FALLBACK, Origin.BREAKPOINT)  # of use as long as their conversation goes on
OF_LAST_TURN = (*TURN_ENDS, Origin.NEAR_END)  # hardly of use once their conversation has gone on


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Evictable:
    """What the eviction queue orders: checkpoints, or the nodes of a layout without states. PrefixStore writes how it
    was used, the queue which place of it is current."""

    num_hits: int = 0
    last_used: float = 0.0
    dropped: bool = False
    queue_entry: int = -1

    @property
    def is_evictable(self) -> bool:
        raise NotImplementedError


@dataclass(slots=True, eq=False, repr=False)
class Node(Evictable):
    """One block of the tree. PrefixTree writes where it stands, PrefixStore how it was used, compaction its `block`.

    `pins` counts the requests whose deepest node this is plus the pinned children: a node with pins, and so
    every ancestor of a request's node, cannot be evicted. A condemned node is no longer found and goes once
    nothing holds it.
    """

    parent: Node | None
    hash: BlockHash
    tokens: bytes
    depth: int  # blocks from the root, this one included
    block: int
    children: dict[Node, None] = field(default_factory=dict)  # a condemned and a sound one may share a hash
    checkpoint: Checkpoint | None = None
    pins: int = 0
    condemned: bool = False

    def rebind(self, move: Move) -> None:
        assert self.block == move.src
        self.block = move.dst

    @property
    def is_evictable(self) -> bool:
        """Nothing below it, no checkpoint, and no request holds it."""
        return not (self.children or self.pins or self.checkpoint)


@dataclass(slots=True, eq=False, repr=False)
class Checkpoint(Evictable):
    """The state after exactly `num_tokens` tokens, in a slot that nobody writes. PrefixStore writes how it was used,
    CacheManager who waits for it or reads it, the eviction policy its `note`, compaction its `slot`.

    `num_readers` counts issued plans (and admitted requests that have yet to read) that need the slot.
    """

    node: Node
    slot: int
    num_tokens: int
    origin: Origin
    decoded: bool  # decode kernels had a part in it: its bits are not those that prefill makes
    num_readers: int = 0
    num_expected: int = 0  # waiting requests known to resume here
    superseded: bool = False  # a later checkpoint of the same conversation exists
    note: object = None  # the eviction policy's

    @property
    def is_evictable(self) -> bool:
        return self.num_readers == 0

    def rebind(self, move: Move) -> None:
        assert self.slot == move.src
        self.slot = move.dst


class PrefixTree:
    """Nodes by hash. A node's ancestors are always present, so the longest match is a walk from the root."""

    def __init__(self) -> None:
        self._roots: dict[BlockHash, Node] = {}
        self._by_hash: dict[BlockHash, Node] = {}
        self.num_nodes = 0
        self.num_pinned = 0

    def root(self, root_hash: BlockHash) -> Node:
        """The root of a salt, made on first use."""
        node = self._roots.get(root_hash)
        if node is None:
            node = Node(None, root_hash, b"", 0, NO_BLOCK)
            self._roots[root_hash] = node
        return node

    def match(self, chain: HashChain, max_blocks: int) -> list[Node]:
        """The longest path of `chain` in the tree, at most `max_blocks` deep; token ids are compared."""
        path: list[Node] = []
        find = self._by_hash.get
        for block_hash, tokens in zip(chain.hashes[:max_blocks], chain.blocks, strict=False):
            node = find(block_hash)
            if node is None or node.tokens != tokens:
                break
            path.append(node)
        return path

    def find(self, block_hash: BlockHash) -> Node | None:
        """The node of that hash, if it is cached."""
        return self._by_hash.get(block_hash)

    def extend(
        self, parent: Node, hashes: Sequence[BlockHash], tokens: Sequence[bytes], blocks: Sequence[int]
    ) -> list[Node]:
        """A chain of new nodes under `parent`, one for each block; returns them from the top down."""
        assert hashes[0] not in self._by_hash  # nor, then, any that follows it
        nodes: list[Node] = []
        depths = range(parent.depth + 1, parent.depth + 1 + len(hashes))
        for depth, block_hash, data, block in zip(depths, hashes, tokens, blocks, strict=True):
            node = Node(parent, block_hash, data, depth, block)
            parent.children[node] = None
            self._by_hash[block_hash] = node
            nodes.append(node)
            parent = node
        self.num_nodes += len(nodes)
        return nodes

    def remove(self, leaf: Node, most: int = 1) -> list[Node]:
        """Remove a free leaf and, up to `most` nodes in all, the ancestors that become free leaves by that.

        Of a condemned leaf condemned ancestors only. Returns what was removed, from the leaf up.
        """
        assert leaf.is_evictable and leaf.parent is not None
        removed = [leaf]
        node = leaf.parent
        del node.children[leaf]
        while len(removed) < most and node.parent and node.condemned == leaf.condemned and node.is_evictable:
            removed.append(node)
            del node.parent.children[node]
            node = node.parent
        for gone in removed:
            gone.dropped = True
        if not leaf.condemned:
            self._forget(removed)
        self.num_nodes -= len(removed)
        if node.depth == 0 and not node.children and not node.pins:
            self._roots.pop(node.hash, None)
        return removed

    def condemn(self, node: Node) -> list[Node]:
        """Hide a node and all below it, which are returned, from lookups: what they hold is not to be trusted."""
        below = list(_with_descendants([node]))
        self._forget([item for item in below if not item.condemned])
        for item in below:
            item.condemned = True
        return below

    def pin(self, node: Node) -> None:
        item: Node | None = node
        while item is not None:
            item.pins += 1
            if item.pins > 1:
                return
            self.num_pinned += item.depth > 0
            item = item.parent

    def unpin(self, node: Node) -> None:
        item: Node | None = node
        while item is not None:
            assert item.pins > 0
            item.pins -= 1
            if item.pins:
                return
            self.num_pinned -= item.depth > 0
            item = item.parent
        if node.depth == 0 and not node.children:
            self._roots.pop(node.hash, None)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        return _with_descendants(child for root in self._roots.values() for child in root.children)

    def _forget(self, nodes: Sequence[Node]) -> None:
        """Lookups find these nodes no more."""
        for node in nodes:
            del self._by_hash[node.hash]

    def check_integrity(self) -> None:
        """Hashes, depths and pins agree with the structure."""
        count = pinned = 0
        for node in self.nodes():
            count += 1
            pinned += node.pins > 0
            assert node.parent is not None and node in node.parent.children
            assert node.depth == node.parent.depth + 1
            assert node.pins >= sum(child.pins > 0 for child in node.children)
            assert node.condemned == (self._by_hash.get(node.hash) is not node)
            if node.checkpoint is not None:
                assert node.checkpoint.node is node and not node.checkpoint.dropped
        assert count == self.num_nodes and pinned == self.num_pinned
        assert all(root.children or root.pins for root in self._roots.values()), "an empty root was left behind"


def _with_descendants(nodes: Iterable[Node]) -> Iterator[Node]:
    """Parents first."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)


def nearest_checkpoint(node: Node | None) -> Checkpoint | None:
    """The checkpoint at `node`, or at the deepest of its ancestors that has one."""
    while node is not None and node.checkpoint is None:
        node = node.parent
    return node.checkpoint if node is not None else None
