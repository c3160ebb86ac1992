"""Counts how many histories contain each block. Only shared blocks take memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from forkpoint.cache.hashing import BlockHash

History = Sequence[BlockHash]


class PrefixInterest:
    """Histories given by the chained hashes of their blocks: equal hashes mean that all earlier blocks are equal too.

    The blocks that a history shares, or once shared, with others are counted one by one. The rest of it takes one entry
    whatever its length.
    """

    def __init__(self) -> None:
        self._counts: dict[BlockHash, int] = {}
        self._rests: dict[BlockHash, History] = {}  # first uncounted block -> its history

    def add(self, history: History) -> None:
        depth = 0
        while depth < len(history) and history[depth] in self._counts:
            self._counts[history[depth]] += 1
            depth += 1
        other = self._rests.pop(history[depth], ()) if depth < len(history) else ()
        common = _common_depth(history, other, depth)
        for block_hash in history[depth:common]:
            self._counts[block_hash] = 2
        for rest in (history, other):
            if common < len(rest):
                self._rests[rest[common]] = rest

    def remove(self, history: History) -> None:
        """Remove a history that was added. KeyError if it was not."""
        counts = self._counts
        for block_hash in history:
            count = counts.get(block_hash)
            if count is None:
                del self._rests[block_hash]
                return
            if count > 1:
                counts[block_hash] = count - 1
            else:
                del counts[block_hash]

    def counts(self, history: History) -> Iterator[int]:
        """Yield how many histories contain each block of `history`, up to the first that none contains."""
        depth = 0
        for block_hash in history:
            count = self._counts.get(block_hash)
            if count is None:
                break
            yield count
            depth += 1
        rest = self._rests.get(history[depth], ()) if depth < len(history) else ()
        yield from itertools.repeat(1, _common_depth(history, rest, depth) - depth)


def _common_depth(one: History, other: History, depth: int) -> int:
    """Return how many blocks two histories share that are equal up to `depth`."""
    while depth < min(len(one), len(other)) and one[depth] == other[depth]:
        depth += 1
    return depth
