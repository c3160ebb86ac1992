"""The blocks of each room that a request could resume at or beyond, and the changes since the last reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from forkpoint.cache.hashing import BlockHash, block_hash, root_hash
from forkpoint.cache.tree import Node

ARENA: Final = "arena"  # the room where the model computes; other rooms have the names of their tiers


@dataclass(slots=True)
class BlocksStored:
    """Requests can now resume at or beyond these blocks of a room: a chain of nodes, from the top down.

    They can resume exactly at the ends of the blocks in `ends`. A block is reported again when that changes.
    """

    room: str
    nodes: list[Node] = field(default_factory=list)
    ends: list[BlockHash] = field(default_factory=list)


@dataclass(slots=True)
class BlocksRemoved:
    """Requests can no longer resume at or beyond these blocks of a room. A block comes before those above it."""

    room: str
    hashes: list[BlockHash]


@dataclass(slots=True)
class AllCleared:
    """Requests can resume nowhere, whatever the room."""


Change: TypeAlias = BlocksStored | BlocksRemoved | AllCleared


class Restorable:
    """Tracks the blocks of a room at or below which a lookup may end.

    PrefixStore reports the blocks where a lookup may end, the ends. While the room is not `is_open`, requests cannot
    resume there, whatever it has: all its blocks are reported as removed, and as stored when it opens again.

    Blocks that only their owner can find are left out: those under a salt and, with `has_private`, those that decode
    kernels computed. Nobody could tell from a prompt's tokens that they are there.
    """

    def __init__(self, room: str, *, has_private: bool, is_open: Callable[[], bool]) -> None:
        self._room = room
        self._is_open = is_open
        self._is_hidden = False  # whether the entries here are reported as removed
        self._has_private = has_private
        self._root = root_hash("")
        self._num_below: dict[Node, int] = {}  # children in this table, plus 1 for an end
        self._ends: set[Node] = set()
        self._changes: list[Change] = []

    def drain(self) -> list[Change]:
        """Return the changes since the last call, in order, and forget them."""
        if self._is_hidden is self._is_open():
            self._set_hidden(not self._is_hidden)
        changes, self._changes = self._changes, []
        return changes

    def gained(self, node: Node) -> None:
        """Note that a lookup may now end at `node`. Nothing happens if it is condemned or left out."""
        if node.condemned or node in self._ends:
            return
        path = []
        item = node
        while item.parent is not None and item not in self._num_below:
            path.append(item)
            item = item.parent
        if (item.parent is None and item.hash != self._root) or (self._has_private and any(map(is_private, path))):
            return
        self._ends.add(node)
        for new in path:
            self._num_below[new] = 1
        if item.parent is not None:
            self._num_below[item] += 1
        self._report(reversed(path or [node]))

    def lost(self, node: Node) -> None:
        """Note that no lookup ends at `node` any more. Nothing happens if none did."""
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
        if not self._is_hidden:
            self._changes.append(BlocksRemoved(self._room, removed))

    def clear(self) -> None:
        """Forget all blocks: lookups find none of them any more."""
        self._num_below.clear()
        self._ends.clear()
        self._changes = [AllCleared()]

    def report_all(self) -> None:
        """Replace the changes so far by a full report, for a listener who missed some."""
        self._changes = [AllCleared()]
        self._report_known()

    def _set_hidden(self, is_hidden: bool) -> None:
        """Report all blocks as removed, or as stored again."""
        if is_hidden:
            deepest_first = sorted(self._num_below, key=lambda node: -node.depth)
            if deepest_first:
                self._changes.append(BlocksRemoved(self._room, [node.hash for node in deepest_first]))
        self._is_hidden = is_hidden
        self._report_known()

    def _report_known(self) -> None:
        stack = [node for node in self._num_below if node.depth == 1]
        while stack:
            node = stack.pop()
            self._report([node])
            stack += [child for child in node.children if child in self._num_below]

    def _report(self, nodes: Iterable[Node]) -> None:
        """Report nodes, from the top down, as stored. A chain that continues the last report is joined to it."""
        for node in () if self._is_hidden else nodes:
            last = self._changes[-1] if self._changes else None
            if not (isinstance(last, BlocksStored) and last.nodes[-1] is node.parent):
                last = BlocksStored(self._room)
                self._changes.append(last)
            last.nodes.append(node)
            if node in self._ends:
                last.ends.append(node.hash)


class RestorableRooms:
    """The trackers of the arena and its tiers, read together. All rooms are cleared at the same time."""

    def __init__(self, rooms: Sequence[Restorable]) -> None:
        self._rooms = rooms

    def drain(self) -> list[Change]:
        """Return the changes since the last call and forget them. Each room's are in order."""
        changes = [change for room in self._rooms for change in room.drain()]
        kept: list[Change] = [change for change in changes if not isinstance(change, AllCleared)]
        if len(kept) < len(changes):
            return [AllCleared(), *kept]
        return kept

    def report_all(self) -> None:
        """Replace the changes so far by a full report, for a listener who missed some."""
        for room in self._rooms:
            room.report_all()


def is_private(node: Node) -> bool:
    """Return whether the node starts blocks that one request alone can find: its hash is not that of its tokens."""
    assert node.parent is not None
    return node.hash != block_hash(node.parent.hash, node.tokens)
