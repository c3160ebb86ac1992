"""The prefix tree: one node per block of 64 tokens, keys and values always, a checkpoint here and there."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from forkpoint.cache.hashing import BlockHash, HashChain

NO_UNIT = -1


@enum.unique
class Provenance(enum.Enum):
    """Which kernels made an entry. Their bits differ; of two sources the worse (larger) one counts."""

    PREFILL = 0
    DECODE = 1


@enum.unique
class Origin(enum.Enum):
    """Why a checkpoint was taken."""

    PROMPT_END = "prompt_end"
    DECLARED = "declared"
    JUNCTION = "junction"
    INTERVAL = "interval"
    NEAR_END = "near_end"
    SPARSE = "sparse"
    FALLBACK = "fallback"
    DECODE = "decode"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call, and these are counted a lot


TURN_ENDS = (Origin.PROMPT_END, Origin.DECODE)  # a conversation goes on from these
OF_CONVERSATION = (*TURN_ENDS, Origin.FALLBACK)
INSIDE_PROMPTS = (Origin.FALLBACK, Origin.SPARSE)  # of use as long as their conversation goes on


@dataclass(slots=True, eq=False)
class Node:
    """One block of the tree. Written by PrefixTree alone (`block` also by compaction).

    `pins` counts the requests whose deepest node this is plus the pinned children: a node with pins, and so
    every ancestor of a request's node, cannot be evicted. A condemned node is no longer found and goes once
    nothing holds it.
    """

    parent: Node | None
    hash: BlockHash
    tokens: bytes
    depth: int  # blocks from the root, this one included
    block: int
    provenance: Provenance
    children: dict[Node, None] = field(default_factory=dict)  # a condemned and a sound one may share a hash
    checkpoint: Checkpoint | None = None
    pins: int = 0
    last_used: float = 0.0
    condemned: bool = False
    num_hits: int = 0
    queue_entry: int = -1  # as in Checkpoint, for layouts without states
    dropped: bool = False

    def rebind(self, old: int, new: int) -> None:
        assert self.block == old
        self.block = new

    def path(self) -> list[Node]:
        """The nodes from depth 1 down to this one (empty for a root)."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.depth:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after exactly `num_tokens` tokens, in a slot that nobody writes. Written by CacheManager.

    `num_readers` counts issued plans (and admitted requests that have yet to read) that need the slot.
    """

    node: Node
    slot: int
    num_tokens: int
    origin: Origin
    provenance: Provenance
    num_readers: int = 0
    num_hits: int = 0
    num_expected: int = 0  # waiting requests known to resume here
    fallback_below: Checkpoint | None = None  # of a fallback: the next one of its conversation, while that is there
    superseded: bool = False  # a later checkpoint of the same conversation exists
    num_turns: int = 0  # how often the conversation that it ends was continued before
    last_used: float = 0.0
    queue_entry: int = -1  # which entry of the eviction queue is current
    above: Checkpoint | None = None  # as `PrefixTree.above` last found it,
    above_as_of: int = -1  # and when
    dropped: bool = False

    def rebind(self, old: int, new: int) -> None:
        assert self.slot == old
        self.slot = new


class PrefixTree:
    """Nodes by hash. A node's ancestors are always present, so the longest match is a walk from the root."""

    def __init__(self) -> None:
        self._roots: dict[BlockHash, Node] = {}
        self._by_hash: dict[BlockHash, Node] = {}
        self._first_blocks: dict[bytes, int] = {}  # tokens of depth-1 nodes -> number of salts that have them
        self._num_put_between = 0  # checkpoints that came between others and those below them
        self.num_nodes = 0
        self.num_pinned = 0

    def root(self, root_hash: BlockHash) -> Node:
        """The root of a salt, made on first use."""
        node = self._roots.get(root_hash)
        if node is None:
            node = Node(None, root_hash, b"", 0, NO_UNIT, Provenance.PREFILL)
            self._roots[root_hash] = node
        return node

    def match(self, chain: HashChain, max_blocks: int) -> list[Node]:
        """The longest path of `chain` in the tree, at most `max_blocks` deep; token ids are compared."""
        path: list[Node] = []
        find, size, data = self._by_hash.get, chain.block_bytes, chain.data
        offset = 0
        for block_hash in chain.hashes[:max_blocks]:
            node = find(block_hash)
            if node is None or node.tokens != data[offset : offset + size]:
                break
            path.append(node)
            offset += size
        return path

    def find(self, block_hash: BlockHash) -> Node | None:
        """The node of that hash, if it is cached."""
        return self._by_hash.get(block_hash)

    def has_first_block(self, tokens: bytes) -> bool:
        """Whether any salt has a first block of these tokens."""
        return self._first_blocks.get(tokens, 0) > 0

    def insert(self, parent: Node, block_hash: BlockHash, tokens: bytes, block: int, provenance: Provenance) -> Node:
        assert block_hash not in self._by_hash
        node = Node(parent, block_hash, tokens, parent.depth + 1, block, provenance)
        parent.children[node] = None
        self._by_hash[block_hash] = node
        self.num_nodes += 1
        if parent.depth == 0:
            self._first_blocks[tokens] = self._first_blocks.get(tokens, 0) + 1
        return node

    def remove(self, node: Node) -> None:
        """Remove an unpinned leaf without a checkpoint."""
        assert not node.children and not node.pins and node.checkpoint is None and node.parent is not None
        parent = node.parent
        del parent.children[node]
        if not node.condemned:
            self._forget(node)
        self.num_nodes -= 1
        if parent.depth == 0 and not parent.children and not parent.pins:
            self._roots.pop(parent.hash, None)

    def condemn(self, node: Node) -> None:
        """Hide a node and all below it from lookups: what they hold is not to be trusted."""
        stack = [node]
        while stack:
            item = stack.pop()
            if not item.condemned:
                item.condemned = True
                self._forget(item)
            stack.extend(item.children)

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

    def set_checkpoint(self, node: Node, checkpoint: Checkpoint | None) -> None:
        """The node has this checkpoint from now on."""
        if node.checkpoint is not None:
            node.checkpoint.above = None
        node.checkpoint = checkpoint
        self._num_put_between += checkpoint is not None and bool(node.children)

    def above(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """The nearest checkpoint before this one; the walk up is done once for as long as its answer holds."""
        found, start = checkpoint.above, checkpoint.node.parent
        if checkpoint.above_as_of == self._num_put_between:
            if found is None or not found.dropped:
                return found
            start = found.node.parent
        checkpoint.above, checkpoint.above_as_of = nearest_checkpoint(start), self._num_put_between
        return checkpoint.above

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def _forget(self, node: Node) -> None:
        if self._by_hash.get(node.hash) is node:
            del self._by_hash[node.hash]
        if node.depth == 1:
            left = self._first_blocks[node.tokens] - 1
            if left:
                self._first_blocks[node.tokens] = left
            else:
                del self._first_blocks[node.tokens]

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
                assert self.above(node.checkpoint) is nearest_checkpoint(node.parent)
        assert count == self.num_nodes and pinned == self.num_pinned
        assert all(root.children or root.pins for root in self._roots.values()), "an empty root was left behind"


def nearest_checkpoint(node: Node | None) -> Checkpoint | None:
    """The checkpoint at `node`, or at the deepest of its ancestors that has one."""
    while node is not None:
        if node.checkpoint is not None:
            return node.checkpoint
        node = node.parent
    return None
