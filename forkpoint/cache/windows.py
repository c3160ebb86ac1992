"""Blocks of layers with windows. Requests and checkpoints share them, and give back those behind the window."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from forkpoint.cache.arena import Arena, Move
from forkpoint.cache.layout import NO_BLOCK, CacheLayout


@dataclass(slots=True, eq=False)
class WindowBlock:
    """A block of `layout.windows[window]`. WindowBlocks counts its holders, compaction writes its `block`.

    Requests and checkpoints with readers hold a block `busy`: eviction cannot free it.
    """

    window: int
    block: int = NO_BLOCK
    num_holders: int = 0  # the busy ones included
    num_busy: int = 0

    def rebind(self, move: Move) -> None:
        assert self.block == move.src
        self.block = move.dst


# The consecutive blocks that one state needs, for each of `layout.windows`.
WindowRuns: TypeAlias = tuple[tuple[WindowBlock, ...], ...]


def ids_of(runs: WindowRuns) -> tuple[tuple[int, ...], ...]:
    """Return where the blocks are in the arena now."""
    return tuple(tuple(each.block for each in run) for run in runs)


@dataclass(slots=True, eq=False)
class WindowRow:
    """The blocks `[start, start + len(blocks))` of one window of a request, by their index in its table."""

    start: int = 0
    blocks: list[WindowBlock] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    def block_ids(self, start: int, end: int) -> list[int]:
        """Return the ids of blocks `[start, end)` of the table. Ids behind the window are 0, on the reserved page."""
        own = self.blocks[max(0, start - self.start) : end - self.start]
        ids = [each.block for each in own]
        return [0] * (end - start - len(ids)) + ids


class WindowBlocks:
    """Takes, shares and gives back blocks of windows. It alone writes WindowRows and the counts of WindowBlocks."""

    def __init__(self, layout: CacheLayout, arena: Arena) -> None:
        self._layout, self._arena = layout, arena
        self.num_busy = [0] * len(layout.windows)  # blocks that eviction cannot free

    def extend(self, row: WindowRow, window: int, end: int, take: Callable[[int, WindowBlock], int | None]) -> int:
        """Let the row take blocks up to index `end`, by calls of `take(window, owner)` until one returns None.

        Returns the index that the row reaches.
        """
        while row.end < end:
            fresh = WindowBlock(window)
            block = take(window, fresh)
            if block is None:
                break
            fresh.block = block
            self._hold(fresh, busy=True)
            row.blocks.append(fresh)
        return row.end

    def trim(self, rows: Iterable[WindowRow], position: int) -> None:
        """Give back the blocks that no token from `position` on attends to."""
        for group, row in zip(self._layout.windows, rows, strict=True):
            first = min(group.first_block(position), row.end)
            if first > row.start:
                self._let_go(row.blocks[: first - row.start], busy=True)
                del row.blocks[: first - row.start]
                row.start = first

    def cut(self, rows: Iterable[WindowRow], end: int) -> None:
        """Give back the blocks from index `end` on."""
        for row in rows:
            kept = max(0, end - row.start)
            self._let_go(row.blocks[kept:], busy=True)
            del row.blocks[kept:]

    def clear(self, rows: Iterable[WindowRow]) -> None:
        """Give back all blocks of these rows, which are then empty."""
        for row in rows:
            self._let_go(row.blocks, busy=True)
            row.blocks, row.start = [], 0

    def start_from(self, rows: Iterable[WindowRow], runs: WindowRuns, num_blocks: int) -> None:
        """Let empty rows share the blocks of a state that ends `num_blocks` blocks into the table."""
        for row, run in zip(rows, runs, strict=True):
            assert not row.blocks
            row.blocks, row.start = list(run), num_blocks - len(run)
            for each in run:
                self._hold(each, busy=True)

    def run(self, rows: Iterable[WindowRow], num_blocks: int, position: int) -> WindowRuns:
        """Return the blocks that the token at `position`, the first after `num_blocks` blocks, attends to.

        AssertionError if the rows no longer have one of them.
        """
        runs = []
        for group, row in zip(self._layout.windows, rows, strict=True):
            first = group.first_block(position)
            assert row.start <= first and num_blocks <= row.end, "blocks of a state were given back"
            runs.append(tuple(row.blocks[first - row.start : num_blocks - row.start]))
        return tuple(runs)

    def hold(self, runs: WindowRuns, *, busy: bool = False) -> None:
        """Count a checkpoint as a holder of its blocks; `busy` when it gets its first reader."""
        for run in runs:
            for each in run:
                self._hold(each, busy)

    def let_go(self, runs: WindowRuns, *, busy: bool = False) -> None:
        """Undo `hold` with the same `busy`."""
        for run in runs:
            self._let_go(run, busy)

    def _hold(self, each: WindowBlock, busy: bool) -> None:
        each.num_holders += 1
        each.num_busy += busy
        self.num_busy[each.window] += busy and each.num_busy == 1

    def _let_go(self, blocks: Iterable[WindowBlock], busy: bool) -> None:
        for each in blocks:
            each.num_holders -= 1
            each.num_busy -= busy
            self.num_busy[each.window] -= busy and each.num_busy == 0
            if not each.num_holders:
                self._arena.give_window_block(each.window, each.block)
