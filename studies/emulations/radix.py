"""A radix tree over token ids whose nodes may hold a state: the prefix tree of SGLang's emulation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from forkpoint.cache.hashing import TokenIds


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of tokens below its parent. `has_state`: the state after `end` tokens is kept.

    `locks` counts the running requests at or below the node. `state_locks` counts those that hold its own state.
    """

    parent: RadixNode | None
    tokens: TokenIds
    end: int
    children: dict[bytes, RadixNode] = field(default_factory=dict)
    has_state: bool = False
    locks: int = 0
    state_locks: int = 0
    used: int = 0  # the tree's clock at the last match or insertion
    state_used: int = 0
    dropped: bool = False

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)


class RadixTree:
    """A tree that matches and splits at multiples of `page` tokens."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.root = RadixNode(None, np.empty(0, np.int32), 0)
        self._clock = itertools.count(1)

    def tick(self) -> int:
        """Return the next reading of the clock that orders uses."""
        return next(self._clock)

    def match(self, tokens: TokenIds, limit: int) -> tuple[RadixNode, int]:
        """Return the deepest node whose tokens all match `tokens[:limit]`, and how far the match continues beyond
        it."""
        limit = limit // self.page * self.page
        node, at = self.root, 0
        while at < limit:
            child = node.children.get(self._key(tokens, at))
            if child is None:
                return node, at
            common = self._common(child.tokens, tokens[at:limit])
            at += common
            if common < len(child.tokens):
                return node, at
            node = child
        return node, at

    def split(self, tokens: TokenIds, node: RadixNode, end: int) -> RadixNode:
        """Split the run of tokens below `node` at `end`, where a match ended, and return the node that ends there.

        The lower half keeps the state.
        """
        if end == node.end:
            return node
        child = node.children[self._key(tokens, node.end)]
        cut = end - node.end
        upper = RadixNode(node, child.tokens[:cut], end, locks=child.locks, used=child.used)
        node.children[self._key(tokens, node.end)] = upper
        child.tokens, child.parent = child.tokens[cut:], upper
        upper.children[self._first_page(child.tokens)] = child
        return upper

    def insert(self, tokens: TokenIds, end: int) -> tuple[RadixNode, int]:
        """Return the node of `tokens[:end]`, created if necessary, and the number of new tokens."""
        end = end // self.page * self.page
        node, at = self.match(tokens, end)
        node = self.split(tokens, node, at)
        new = end - at
        if new:
            child = RadixNode(node, tokens[at:end], end)
            node.children[self._first_page(child.tokens)] = child
            node = child
        self.touch(node)
        return node, new

    def touch(self, node: RadixNode) -> None:
        """Record that the path to `node` is used now."""
        now = self.tick()
        item: RadixNode | None = node
        while item is not None:
            item.used = now
            item = item.parent

    def lock(self, node: RadixNode, change: int) -> None:
        """Add `change` to the running requests that hold the path to `node`."""
        item: RadixNode | None = node
        while item is not None:
            item.locks += change
            item = item.parent

    def remove(self, leaf: RadixNode) -> None:
        """Remove a node without children."""
        assert not leaf.children and leaf.parent is not None and not leaf.locks
        del leaf.parent.children[self._first_page(leaf.tokens)]
        leaf.dropped = True

    def path(self, node: RadixNode) -> Iterator[RadixNode]:
        """Yield `node` and its ancestors, without the root."""
        item: RadixNode | None = node
        while item is not None and item.parent is not None:
            yield item
            item = item.parent

    def _key(self, tokens: TokenIds, at: int) -> bytes:
        return tokens[at : at + self.page].tobytes()

    def _first_page(self, tokens: TokenIds) -> bytes:
        return tokens[: self.page].tobytes()

    def _common(self, edge: TokenIds, tokens: TokenIds) -> int:
        """Return the number of equal leading tokens, in whole pages."""
        length = min(len(edge), len(tokens))
        differs = edge[:length] != tokens[:length]
        first = int(differs.argmax()) if length else 0
        equal = first if length and differs[first] else length
        return equal // self.page * self.page
