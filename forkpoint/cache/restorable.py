"""Which blocks a request could resume at or beyond, and what changed since it was last asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from forkpoint.cache.hashing import BlockHash, block_hash, root_hash
from forkpoint.cache.tree import Node


@dataclass(slots=True)
class BlocksStored:
    """A chain of blocks that can be resumed at or beyond from now on: nodes from the top down.

    Of these, requests can resume at the ends of exactly those in `ends`. A block that was stored already is told
    again when that changes.
    """

    nodes: list[Node] = field(default_factory=list)
    ends: list[BlockHash] = field(default_factory=list)


@dataclass(slots=True)
class BlocksRemoved:
    """No request can resume at or beyond these any more; a block comes before those above it."""

    hashes: list[BlockHash]


@dataclass(slots=True)
class AllCleared:
    """Nothing can be resumed from."""


Change: TypeAlias = BlocksStored | BlocksRemoved | AllCleared


class Restorable:
    """Blocks with an end at or below them: a block where a lookup may end. PrefixStore tells it of ends.

    What only its owner can find (a salt's, or, with `has_private`, what decode kernels made) is left out: a prompt's
    tokens do not say that it is there.
    """

    def __init__(self, has_private: bool) -> None:
        self._has_private = has_private
        self._root = root_hash("")
        self._num_below: dict[Node, int] = {}  # of each such block: its children in here, and itself if it is an end
        self._ends: set[Node] = set()
        self._changes: list[Change] = []

    def drain(self) -> list[Change]:
        """What changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def gained(self, node: Node) -> None:
        """A lookup may end at `node` from now on."""
        if node.condemned or node in self._ends:
            return
        path = []
        item = node
        while item.parent is not None and item not in self._num_below:
            path.append(item)
            item = item.parent
        if (item.parent is None and item.hash != self._root) or (self._has_private and any(map(_is_private, path))):
            return
        self._ends.add(node)
        for new in path:
            self._num_below[new] = 1
        if item.parent is not None:
            self._num_below[item] += 1
        self._report(reversed(path or [node]))

    def lost(self, node: Node) -> None:
        """No lookup ends at `node` any more; nothing happens if none did."""
        if node not in self._ends:
            return
        self._ends.remove(node)
        self._num_below[node] -= 1
        if self._num_below[node]:
            self._report([node])
            return
        removed = []
        item = node
        while item.parent is not None and not self._num_below[item]:
            del self._num_below[item]
            removed.append(item.hash)
            item = item.parent
            if item.parent is not None:
                self._num_below[item] -= 1
        self._changes.append(BlocksRemoved(removed))

    def clear(self) -> None:
        """Lookups find nothing of what was there."""
        self._num_below.clear()
        self._ends.clear()
        self._changes = [AllCleared()]

    def report_all(self) -> None:
        """In place of the changes so far: that all is cleared, then all there is, for who missed some."""
        self._changes = [AllCleared()]
        stack = [node for node in self._num_below if node.depth == 1]
        while stack:
            node = stack.pop()
            self._report([node])
            stack += [child for child in node.children if child in self._num_below]

    def _report(self, nodes: Iterable[Node]) -> None:
        """Nodes from the top down are stored; a chain that goes on is told as one."""
        for node in nodes:
            last = self._changes[-1] if self._changes else None
            if not (isinstance(last, BlocksStored) and last.nodes[-1] is node.parent):
                last = BlocksStored()
                self._changes.append(last)
            last.nodes.append(node)
            if node in self._ends:
                last.ends.append(node.hash)


def _is_private(node: Node) -> bool:
    """The first of the blocks that only one request can find; its hash is not that of its tokens."""
    assert node.parent is not None
    return node.hash != block_hash(node.parent.hash, node.tokens)
