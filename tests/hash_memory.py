"""What blocks and slots hold for the hash runner, and how many rows use a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.plan import IntArray, Move, MoveKind
from tests.hash_step import require
from tests.rolling_hash import HashArray

GARBAGE = -1  # the position of what was not written
WindowContents: TypeAlias = list[list[tuple[IntArray, HashArray]]]  # of each window, positions and hashes of its blocks


@dataclass(slots=True)
class HashMemory:
    """A block holds each token's position and the hash of all tokens up to it, a slot one of each. Page 0 is reserved
    and may not be written. In a memory without windows a slot also holds the blocks of windows that came with it."""

    layout: CacheLayout
    num_pages: int
    _slot_position: npt.NDArray[np.int64] = field(init=False)  # [slots]
    _slot_roll: HashArray = field(init=False)
    _block_position: IntArray = field(init=False)  # [blocks, block_size]
    _block_roll: HashArray = field(init=False)
    _block_users: IntArray = field(init=False)  # rows whose table names the block
    _window_position: list[IntArray] = field(init=False)  # of each window, [blocks, block_size]
    _window_roll: list[HashArray] = field(init=False)
    _with_slot: dict[int, WindowContents] = field(default_factory=dict)  # blocks of windows that a slot holds
    _page_kind: list[tuple[MoveKind, int] | None] = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.num_pages * self.layout.blocks_per_page
        slots = self.num_pages * self.layout.slots_per_page
        self._slot_position = np.full(slots, GARBAGE, np.int64)
        self._slot_roll = np.zeros(slots, np.uint64)
        self._block_position = np.full((blocks, BLOCK_SIZE), GARBAGE, np.int32)
        self._block_roll = np.zeros((blocks, BLOCK_SIZE), np.uint64)
        self._block_users = np.zeros(blocks, np.int32)
        shapes = [(self.num_pages * group.blocks_per_page, BLOCK_SIZE) for group in self.layout.windows]
        self._window_position = [np.full(shape, GARBAGE, np.int32) for shape in shapes]
        self._window_roll = [np.zeros(shape, np.uint64) for shape in shapes]
        self._page_kind = [None] * self.num_pages

    def window_of(self, kind: MoveKind, group: int) -> int | None:
        """The number of the window whose blocks a move or a claim is about."""
        number = group - self.layout.has_kv
        return number if kind is MoveKind.BLOCK and number >= 0 else None

    def claim(self, step: int, kind: MoveKind, index: int, group: int = 0) -> None:
        """A write to one kind of contents makes garbage of the other kinds in the same page."""
        window = self.window_of(kind, group)
        is_block = kind is MoveKind.BLOCK and window is None
        per_page = self.layout.blocks_per_page if is_block else self.layout.slots_per_page
        if window is not None:
            per_page = self.layout.windows[window].blocks_per_page
        in_range = per_page <= index < self.num_pages * per_page
        require(in_range, step, f"writes {kind.value} {index}, which is not in pages [1, {self.num_pages})")
        page = index // per_page
        if self._page_kind[page] == (kind, group):
            return
        self._page_kind[page] = (kind, group)
        for number, each in enumerate(self.layout.windows):
            if number != window:
                self._window_position[number][page * each.blocks_per_page : (page + 1) * each.blocks_per_page] = GARBAGE
        blocks, slots = self.layout.blocks_per_page, self.layout.slots_per_page
        if kind is not MoveKind.SLOT:
            self._slot_position[page * slots : (page + 1) * slots] = GARBAGE
        if not is_block:
            used = bool(self._block_users[page * blocks : (page + 1) * blocks].any())
            require(not used, step, f"writes {kind.value} {index} in page {page}, whose blocks a row uses")
            self._block_position[page * blocks : (page + 1) * blocks] = GARBAGE

    def move(self, step: int, kind: MoveKind, src: int, dst: int, group: int = 0) -> None:
        """Contents and users. The source is garbage after it."""
        require(src != dst, step, f"moves {kind.value} {src} onto itself")
        self.claim(step, kind, dst, group)
        window = self.window_of(kind, group)
        if window is not None:
            for contents in (self._window_position[window], self._window_roll[window]):
                contents[dst] = contents[src]
            self._window_position[window][src] = GARBAGE
            return
        if kind is MoveKind.SLOT:
            self._slot_position[dst], self._slot_roll[dst] = self._slot_position[src], self._slot_roll[src]
            self._slot_position[src] = GARBAGE
            self._with_slot[dst] = self._with_slot.pop(src, [])
            return
        require(not self._block_users[dst], step, f"moves block {src} onto {dst}, which a row uses")
        self._block_position[dst], self._block_roll[dst] = self._block_position[src], self._block_roll[src]
        self._block_position[src] = GARBAGE
        self._block_users[dst], self._block_users[src] = self._block_users[src], 0

    def copy_from(self, other: HashMemory, step: int, move: Move, garbage_is_allowed: bool) -> None:
        """Contents of a unit of another memory, which keeps them. Garbage is copied after a failed step only."""
        whole = other.is_whole(move)
        require(whole or garbage_is_allowed, step, f"copies {move.kind.value} {move.src}, which holds garbage")
        self.put(step, move, other.contents(move))

    def contents(self, move: Move) -> Any:
        """The contents of the unit `move.src`, for `put`; with a state those of the blocks of its windows."""
        index = move.src
        if move.kind is MoveKind.BLOCK:
            return self._block_position[index].copy(), self._block_roll[index].copy()
        if not self.layout.windows:
            return *self.state(index), self._with_slot.get(index, [])
        windows: WindowContents = []
        for window, blocks in enumerate(move.windows):
            memory = self._window_position[window], self._window_roll[window]
            windows.append([(memory[0][block].copy(), memory[1][block].copy()) for block in blocks])
        return *self.state(index), windows

    def put(self, step: int, move: Move, contents: Any) -> None:
        """Write what `contents` returned to the unit `move.dst`, and to the blocks `move.windows`."""
        index = move.dst
        self.claim(step, move.kind, index)
        if move.kind is MoveKind.BLOCK:
            require(not self._block_users[index], step, f"copies a block onto {index}, which a row uses")
            self._block_position[index], self._block_roll[index] = contents
            return
        self._slot_position[index], self._slot_roll[index], found = contents
        if not self.layout.windows:
            self._with_slot[index] = found
            return
        sizes = [len(run) for run in found], [len(run) for run in move.windows]
        require(sizes[0] == sizes[1], step, f"copies blocks of windows {sizes[0]} to {sizes[1]}")
        for window, (run, blocks) in enumerate(zip(found, move.windows, strict=True)):
            for each, block in zip(run, blocks, strict=True):
                self.claim(step, MoveKind.BLOCK, block, window + self.layout.has_kv)
                self._window_position[window][block], self._window_roll[window][block] = each

    def is_whole(self, move: Move) -> bool:
        """Whether all of the unit `move.src` was written, and of the blocks `move.windows`."""
        if move.kind is MoveKind.BLOCK:
            return bool((self._block_position[move.src] != GARBAGE).all())
        position, _, windows = self.contents(move)
        is_right = position != GARBAGE and (not self.layout.windows or len(windows) == len(self.layout.windows))
        return is_right and all(bool((each != GARBAGE).all()) for run in windows for each, _ in run)

    # -- blocks

    def num_users(self, block: int) -> int:
        return int(self._block_users[block])

    def use(self, blocks: IntArray) -> None:
        np.add.at(self._block_users, blocks, 1)

    def release(self, blocks: IntArray) -> None:
        self._block_users[blocks] -= 1

    def hand_out(self, block: int) -> None:
        """To one row, as new."""
        self._block_position[block] = GARBAGE
        self._block_users[block] = 1

    def keys(self, blocks: IntArray, end: int) -> tuple[IntArray, HashArray]:
        """Positions and hashes of the first `end` tokens of a row with these blocks."""
        used = blocks[: -(-end // BLOCK_SIZE)]
        return self._block_position[used].ravel()[:end], self._block_roll[used].ravel()[:end]

    def write_keys(self, blocks: IntArray, start: int, rolls: list[int]) -> None:
        """Store the keys of a row's tokens from `start` on."""
        size = BLOCK_SIZE
        positions = np.arange(start, start + len(rolls), dtype=np.int32)
        at = blocks[positions // size], positions % size
        self._block_position[at] = positions
        self._block_roll[at] = np.asarray(rolls, np.uint64)

    def spoil_blocks(self, blocks: IntArray) -> None:
        self._block_position[blocks] = GARBAGE

    # -- blocks of windows

    def hand_out_window_block(self, step: int, window: int, block: int) -> None:
        self.claim(step, MoveKind.BLOCK, block, window + self.layout.has_kv)
        self._window_position[window][block] = GARBAGE

    def window_keys(self, window: int, table: list[int], end: int) -> tuple[int, IntArray, HashArray]:
        """The first position that the token at `end` attends to; positions and hashes of the tokens from there on."""
        width = self.layout.windows[window].window
        assert width is not None
        first = max(0, end + 1 - width)
        used = table[first // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        own = slice(first % BLOCK_SIZE, end - first // BLOCK_SIZE * BLOCK_SIZE)
        return first, self._window_position[window][used].ravel()[own], self._window_roll[window][used].ravel()[own]

    def write_window_keys(self, window: int, table: list[int], start: int, rolls: list[int]) -> None:
        positions = np.arange(start, start + len(rolls), dtype=np.int32)
        at = np.asarray(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        self._window_position[window][at] = positions
        self._window_roll[window][at] = np.asarray(rolls, np.uint64)

    def spoil_window_blocks(self, window: int, blocks: list[int]) -> None:
        self._window_position[window][blocks] = GARBAGE

    # -- slots

    def state(self, slot: int) -> tuple[int, int]:
        """Number of tokens, and their hash."""
        return int(self._slot_position[slot]), int(self._slot_roll[slot])

    def store(self, slot: int, position: int, roll: int) -> None:
        self.claim(-1, MoveKind.SLOT, slot)
        self._slot_position[slot], self._slot_roll[slot] = position, roll

    def spoil_slot(self, slot: int) -> None:
        self._slot_position[slot] = GARBAGE
