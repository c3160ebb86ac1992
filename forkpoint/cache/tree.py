"""The prefix tree: one node per block of 64 tokens, with its keys and values, and a checkpoint here and there."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from forkpoint.cache.arena import Move
from forkpoint.cache.hashing import BlockHash, HashChain, chained_hashes
from forkpoint.cache.layout import NO_BLOCK
from forkpoint.cache.windows import WindowRuns


@enum.unique
class Origin(enum.StrEnum):
    """Why a checkpoint was saved, the most valuable reason first. BLOCK stands for a block, which has no reason."""

    JUNCTION = "junction"  # other histories, cached or waiting, part from this one here
    PROMPT_END = "prompt_end"
    DECODE = "decode"  # the last boundary of an answer
    BREAKPOINT = "breakpoint"
    NEAR_END = "near_end"  # one boundary before the end, for prompts whose last words the next turn does not repeat
    FALLBACK = "fallback"  # inside long prompts: what is left when their end is evicted
    INTERVAL = "interval"
    BLOCK = "block"  # keys and values alone, of models without states

    __hash__ = str.__hash__  # Enum's own is a slow Python call, and counters hash these often


TURN_ENDS = (Origin.PROMPT_END, Origin.DECODE)  # where a conversation is continued
OF_CONVERSATION = (*TURN_ENDS, Origin.FALLBACK)
INSIDE_PROMPTS = (Origin.FALLBACK, Origin.BREAKPOINT)  # useful as long as their conversation is continued
OF_LAST_TURN = (*TURN_ENDS, Origin.NEAR_END)  # hardly useful once their conversation was continued


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Evictable:
    """An entry that the eviction queue orders: a checkpoint, or in a layout without states a node.

    PrefixStore writes how it was used, EvictionQueue the number of its last push (`queue_number`). It is `removed` once
    it was evicted or dropped.
    """

    num_hits: int = 0
    last_used: float = 0.0
    removed: bool = False
    queue_number: int = -1

    @property
    def is_evictable(self) -> bool:
        raise NotImplementedError


@dataclass(slots=True, eq=False, repr=False)
class Node(Evictable):
    """One block of the tree. PrefixTree writes its place, PrefixStore how it was used, compaction its `block`.

    `pins` counts the requests whose deepest node this is, plus the pinned children. A node with pins cannot be evicted,
    and so no ancestor of a request's node can. A condemned node is no longer found, and is removed once nothing holds
    it.
    """

    parent: Node | None
    hash: BlockHash
    tokens: bytes
    depth: int  # blocks from the root, this one included
    block: int
    children: dict[Node, None] = field(default_factory=dict)  # a condemned child and a sound one may share a hash
    checkpoint: Checkpoint | None = None
    pins: int = 0
    condemned: bool = False

    def rebind(self, move: Move) -> None:
        assert self.block == move.src
        self.block = move.dst

    @property
    def is_evictable(self) -> bool:
        """Whether it is a leaf of the tree without a checkpoint, and no request holds it."""
        return not (self.removed or self.children or self.pins or self.checkpoint)


@dataclass(slots=True, eq=False, repr=False)
class Checkpoint(Evictable):
    """The state after exactly `num_tokens` tokens, in a slot that nobody writes.

    PrefixStore writes how it was used, CacheManager who expects or reads it, the eviction policy its `note`, compaction
    its `slot`. `num_readers` counts the plans in flight and the leases that still have to read the slot. `windows` are
    the blocks that the next token attends to, for each of `layout.windows`.
    """

    node: Node
    slot: int
    num_tokens: int
    origin: Origin
    decoded: bool  # decode kernels computed a part of it: its bits are not those of prefill
    windows: WindowRuns = ()
    num_readers: int = 0
    num_expected: int = 0  # waiting requests that would resume here
    superseded: bool = False  # a later checkpoint of the same conversation exists
    note: object = None  # the eviction policy's note

    @property
    def is_spare(self) -> bool:
        """Whether nobody has used the checkpoint, or is about to."""
        return not (self.removed or self.num_readers or self.num_hits or self.num_expected)

    @property
    def is_provisional(self) -> bool:
        """Whether nobody has used the checkpoint, and rows that run have its block.

        The row that decoded past it keeps a newer one at its next block boundary.
        """
        return self.origin is Origin.DECODE and self.node.pins > 0 and self.is_spare

    @property
    def is_evictable(self) -> bool:
        return not (self.removed or self.num_readers)

    def rebind(self, move: Move) -> None:
        assert self.slot == move.src
        self.slot = move.dst


Entry: TypeAlias = Node | Checkpoint  # a node stands for its block


class PrefixTree:
    """Nodes by hash. A node's ancestors are always there, so the longest match is found from the root down."""

    def __init__(self) -> None:
        self._roots: dict[BlockHash, Node] = {}
        self._by_hash: dict[BlockHash, Node] = {}
        self.num_nodes = 0
        self.num_pinned = 0  # without roots

    def root(self, root_hash: BlockHash) -> Node:
        """Return the root of a salt; the first call creates it."""
        node = self._roots.get(root_hash)
        if node is None:
            node = Node(None, root_hash, b"", 0, NO_BLOCK)
            self._roots[root_hash] = node
        return node

    def match(self, chain: HashChain, max_blocks: int) -> list[Node]:
        """Return the longest path of `chain` in the tree, at most `max_blocks` deep. Token ids are compared too."""
        path: list[Node] = []
        find = self._by_hash.get
        for block_hash, tokens in zip(chain.hashes[:max_blocks], chain.blocks, strict=False):
            node = find(block_hash)
            if node is None or node.tokens != tokens:
                break
            path.append(node)
        return path

    def hash_history(self, root_hash: BlockHash, blocks: Sequence[bytes]) -> list[BlockHash]:
        """Return what `chained_hashes` does for a history from its start. No node may be private.

        Comparing a block with the only child of the node before it takes a fifth of the time of hashing it.
        """
        hashes: list[BlockHash] = []
        last, node = root_hash, self._roots.get(root_hash)
        for block in blocks:
            if node is None:
                break
            children, node = node.children, None
            if len(children) == 1:
                (node,) = children
            if node is not None and node.tokens == block:
                last = node.hash
            else:
                (last,) = chained_hashes(last, [block])
                node = self._by_hash.get(last)
            hashes.append(last)
        return hashes + chained_hashes(last, blocks[len(hashes) :])

    def find(self, block_hash: BlockHash) -> Node | None:
        """Return the node of that hash; None if it is not cached, or condemned."""
        return self._by_hash.get(block_hash)

    def extend(
        self, parent: Node, hashes: Sequence[BlockHash], tokens: Sequence[bytes], blocks: Sequence[int]
    ) -> list[Node]:
        """Add a chain of nodes under `parent`, one for each block, none of them cached. Returns them in order."""
        assert hashes[0] not in self._by_hash  # then those that follow are not cached either
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

    def extend_many(self, entries: Iterable[tuple[int, int, BlockHash, BlockHash]]) -> dict[int, Node]:
        """Add nodes without tokens, each as (block, depth, hash, parent's hash), parents first.

        Returns them by block. Leaves out nodes whose parent is not there, and nodes that are there already.
        """
        by_hash, added = self._by_hash, dict[int, Node]()
        for block, depth, block_hash, parent_hash in entries:
            parent = by_hash.get(parent_hash)
            if depth == 1:
                parent = self.root(parent_hash)
            if parent is None or parent.depth != depth - 1 or block_hash in by_hash:
                continue
            by_hash[block_hash] = added[block] = node = Node(parent, block_hash, b"", depth, block)
            parent.children[node] = None
        self.num_nodes += len(added)
        return added

    def add_end(self, depth: int, block_hash: BlockHash, parent_hash: BlockHash) -> Node | None:
        """Add a node without tokens and without a block, and return it; None if it is there already.

        It ends a path of which nothing else is known, and hangs from a root of its parent's hash.
        """
        if block_hash in self._by_hash:
            return None
        root = self.root(parent_hash)
        node = self._by_hash[block_hash] = Node(root, block_hash, b"", depth, NO_BLOCK)
        root.children[node] = None
        self.num_nodes += 1
        return node

    def remove(self, leaf: Node, most: int = 1) -> list[Node]:
        """Remove an evictable leaf and the ancestors that become evictable, `most` nodes in all.

        A condemned leaf takes only condemned ancestors with it. A root without children goes too. Returns the removed
        nodes, from the leaf up.
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
            gone.removed = True
        if not leaf.condemned:
            self._forget(removed)
        self.num_nodes -= len(removed)
        if node.depth == 0 and not node.children and not node.pins:
            self._roots.pop(node.hash, None)
        return removed

    def condemn(self, node: Node) -> list[Node]:
        """Hide a node and all below it from lookups, for good. Returns all of them."""
        below = list(_with_descendants([node]))
        self._forget([item for item in below if not item.condemned])
        for item in below:
            item.condemned = True
        return below

    def pin(self, node: Node) -> None:
        """Hold a node. If nothing held it before, it holds its parent, and so on up to the root."""
        item: Node | None = node
        while item is not None:
            item.pins += 1
            if item.pins > 1:
                return
            self.num_pinned += item.depth > 0
            item = item.parent

    def unpin(self, node: Node) -> None:
        """Undo `pin`. A root that has no children and is no longer held is removed."""
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
        """Yield all nodes except roots, parents first."""
        return _with_descendants(child for root in self._roots.values() for child in root.children)

    def _forget(self, nodes: Sequence[Node]) -> None:
        """Hide these nodes from lookups."""
        for node in nodes:
            del self._by_hash[node.hash]

    def check_integrity(self) -> None:
        """Raise AssertionError unless hashes, depths and pins agree with the structure."""
        count = pinned = 0
        for node in self.nodes():
            count += 1
            pinned += node.pins > 0
            assert node.parent is not None and node in node.parent.children
            assert node.depth == node.parent.depth + 1 or (not node.parent.depth and node.block == NO_BLOCK)
            assert node.pins >= sum(child.pins > 0 for child in node.children)
            assert node.condemned == (self._by_hash.get(node.hash) is not node)
            if node.checkpoint is not None:
                assert node.checkpoint.node is node and not node.checkpoint.removed
        assert count == self.num_nodes and pinned == self.num_pinned
        assert all(root.children or root.pins for root in self._roots.values()), "an empty root was left behind"


def _with_descendants(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield these nodes and all below them, parents first."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)


def node_of(entry: Entry) -> Node:
    """Return a checkpoint's node, or the node itself."""
    return entry if isinstance(entry, Node) else entry.node


def nearest_checkpoint(node: Node | None) -> Checkpoint | None:
    """Return the checkpoint at `node`, or at its deepest ancestor that has one; None if none has."""
    while node is not None and node.checkpoint is None:
        node = node.parent
    if node is None:
        return None
    return node.checkpoint


def path_below(depth: int, end: Node) -> list[Node]:
    """Return the nodes below `depth` on the path to `end`, from the top down, with `end` itself."""
    path: list[Node] = []
    node: Node | None = end
    while node is not None and node.depth > depth:
        path.append(node)
        node = node.parent
    return path[::-1]
