"""Index tensors of one step, built once on the host and shared by all layers.

Row order is the same everywhere: decode rows first, then prefill segments. Slot `-1` as `src` is the zero
state; `-1` as `dst` stores nothing. Index tensors are int32 unless said. A step may be padded so that a recorded
graph serves it: padded decode rows and segments have `src = dst = -1` and no tokens, keys or parts, padded list
entries have row -1. Sizes that vary are read from the device; host copies (`lens`, `query_lens`, `host_kv_lens`)
are for operators on the host, and are empty where the index lives elsewhere: `on_host` reads them from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

TILE = 64  # tokens of one row that a tiled kernel takes at a time
PART_BLOCKS = 2  # blocks of keys in the smallest part of a decode row
SHORT_BLOCKS = 8  # longer rows have parts of twice as many: few programs would wait for one block after another
MAX_PARTS = 64  # of one decode row

IntArray = npt.NDArray[np.int32]


def tile_table(lens: IntArray, first_row: int = 0) -> IntArray:
    """`[NT, 2]`: (row, offset of its first token in the row) of every 64-token tile of rows of `lens` tokens."""
    if not len(lens):
        return np.empty((0, 2), np.int32)
    counts = -(-lens // TILE)
    rows = np.repeat(np.arange(len(lens), dtype=np.int32), counts)
    within = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    return np.stack([rows + np.int32(first_row), within * np.int32(TILE)], axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class KeySplits:
    """How the keys of decode rows are split into parts for programs that run at once.

    With `wanted`, a step has about so many parts, dealt to its rows by their lengths. Without, a row's parts are a
    function of its own length, and so are its bits. So many tokens of a row that follow each other are `folded`: their
    keys are read once.
    """

    block_size: int = TILE
    wanted: int | None = None
    folded: int = 1

    def table(self, kv_lens: IntArray) -> tuple[IntArray, IntArray]:
        """`[NP, 3]` (row, first block, end block), and each row's first part `[N + 1]`."""
        blocks = -(-kv_lens.astype(np.int64) // self.block_size)
        sizes = self._sizes(blocks)
        counts = -(-blocks // sizes)
        pointers = running_total(counts)
        rows = np.repeat(np.arange(len(kv_lens)), counts)
        first = (np.arange(len(rows)) - pointers[rows]) * sizes[rows]
        end = np.minimum(first + sizes[rows], blocks[rows])
        return np.stack([rows, first, end], axis=1).astype(np.int32), pointers

    def folded_table(self, kv_lens: IntArray, lens: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The same of rows with `lens` tokens, each of which sees `kv_lens[N]` keys; and the first of the tokens that
        each is folded with `[N]`, whose parts are those of all."""
        counts, behind = -(-lens // self.folded), np.cumsum(lens)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(behind - lens, counts) + within * self.folded
        end = np.minimum(first + self.folded, np.repeat(behind, counts))
        parts, pointers = self.table(kv_lens[end - 1])
        parts[:, 0] = first[parts[:, 0]]
        each = np.zeros(len(kv_lens), np.int32)
        each[first] = np.diff(pointers)
        return parts, running_total(each), np.repeat(first, end - first).astype(np.int32)

    def most(self, num_rows: int, max_blocks: int) -> int:
        """Parts that a step of `num_rows` rows of up to `max_blocks` blocks can have."""
        if self.wanted is not None:
            return min(num_rows * min(MAX_PARTS, -(-max_blocks // PART_BLOCKS)), num_rows + self.wanted)
        blocks = np.arange(1, max_blocks + 1)
        return num_rows * int(np.max(-(-blocks // self._sizes(blocks))))

    def _sizes(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Blocks in each part of each row."""
        if self.wanted is None:
            long = PART_BLOCKS * 2
            return np.where(blocks <= SHORT_BLOCKS, PART_BLOCKS, long * np.maximum(1, -(-blocks // (MAX_PARTS * long))))
        smallest = np.minimum(-(-blocks // PART_BLOCKS), MAX_PARTS)
        counts = np.minimum(blocks * self.wanted // max(1, int(blocks.sum())), smallest)
        return np.maximum(1, -(-blocks // np.maximum(1, counts)))


def running_total(lens: Sequence[int] | npt.NDArray[np.integer]) -> IntArray:
    """`[n + 1]`: 0, then the sums of the first 1, 2, .. n."""
    out = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(np.asarray(lens, np.int32), out=out[1:])
    return out


class _Rows:
    """What each row reads and writes."""

    __slots__ = ()
    src: Tensor

    def __len__(self) -> int:
        return int(self.src.shape[0])


@dataclass(frozen=True, slots=True)
class DecodeIndex(_Rows):
    """Slots of the `B` one-token rows: each reads `src[b]` and writes `dst[b]` (equal in steady decode)."""

    src: Tensor  # [B]
    dst: Tensor  # [B]

    @property
    def columns(self) -> list[Tensor]:
        return [self.src, self.dst]


@dataclass(frozen=True, slots=True)
class VerifyIndex(_Rows):
    """`B` rows of one token or more, the first of which is certain and the others drafts.

    Row `b` first folds: the state in slot `src[b]` goes on by the first `pending[b]` tokens whose records are in line
    `read[b]`; after `mark[b]` of them (0: nowhere) it also goes to slot `mark_dst[b]`. Of a row planned ahead the mark
    may be beyond the pending ones: that slot's contents are then of no account. Then come the row's tokens
    `[cu_tokens[b], cu_tokens[b + 1])`. The state after a row's only token goes to slot `dst[b]`. A row with drafts
    writes the state before its tokens there, and of each token a record to line `write[b]`. Records that are read by
    the program alone which writes them, such as a channel's inputs, have one line for both, `line[b]`. A padded row has
    no tokens and `src = dst = -1`; tokens behind those of all rows are padding, for which the operators answer zeros.
    """

    src: Tensor  # [B]
    dst: Tensor  # [B]
    cu_tokens: Tensor  # [B + 1]
    pending: Tensor  # [B]
    mark: Tensor  # [B]
    mark_dst: Tensor  # [B]
    read: Tensor  # [B]
    write: Tensor  # [B]
    line: Tensor  # [B]

    @property
    def columns(self) -> list[Tensor]:
        """All fields but the last, in their order."""
        return [getattr(self, name) for name in self.__slots__[:-1]]

    @property
    def single_columns(self) -> list[Tensor]:
        """The same for records that have one line."""
        return [*self.columns[:-2], self.line, self.line]


@dataclass(frozen=True, slots=True)
class RecordIndex(_Rows):
    """`B` rows of one token or more, the first of which is certain and the others drafts, whose states are written at
    multiples of `interval` tokens.

    Row `b` has the state after `written[b]` tokens in slot `src[b]`, and in line `line[b]` records of the `held[b]`
    tokens behind them. Where these come to a multiple of the interval, the state goes on to the last one and is
    written to slot `dst[b]`, after `mark[b]` of them (0: nowhere; of a row planned ahead it may be beyond) also to slot
    `mark_dst[b]`. Elsewhere it goes to `dst[b]` as it is if `src[b]` is another slot. Then come the row's tokens
    `[cu_tokens[b], cu_tokens[b + 1])`, each of which leaves a record. Records stand at their position modulo the line's
    length. A padded row has no tokens and `src = dst = -1`; tokens behind those of all rows are padding, for which the
    operators answer zeros.
    """

    interval: int
    src: Tensor  # [B]
    dst: Tensor  # [B]
    cu_tokens: Tensor  # [B + 1]
    line: Tensor  # [B]
    written: Tensor  # [B]
    held: Tensor  # [B]
    mark: Tensor  # [B]
    mark_dst: Tensor  # [B]

    @property
    def columns(self) -> list[Tensor]:
        """All fields but the first, in their order."""
        return [getattr(self, name) for name in self.__slots__[1:]]


@dataclass(frozen=True, slots=True)
class SegmentIndex(_Rows):
    """`N` prefill segments, laid end to end.

    Segment `n` reads its initial state from slot `src[n]` and writes its final state to `dst[n]`. Its saves
    are entries `[save_ptr[n], save_ptr[n+1])`: after `save_pos[e]` tokens of the segment (1 <= save_pos <= len,
    ascending, a multiple of 64 from the segment's start unless it is the segment's length) the state also
    goes to slot `save_dst[e]`. Within one launch no slot is written twice, and no slot that a row reads is
    written by another row or by a save.
    """

    cu_seqlens: Tensor  # [N + 1]
    src: Tensor  # [N]
    dst: Tensor  # [N]
    save_ptr: Tensor  # [N + 1]
    save_pos: Tensor  # [E]
    save_dst: Tensor  # [E]
    lens: tuple[int, ...] = ()  # host copy
    tiles: Tensor | None = None  # [NT, 2]: see `tile_table`; for kernels that run over tiles

    @property
    def columns(self) -> list[Tensor]:
        """What kernels read of it, in the order of the fields."""
        return [self.cu_seqlens, self.src, self.dst, self.save_ptr, self.save_pos, self.save_dst]

    def on_host(self) -> tuple[int, ...]:
        """The segments' lengths; where there is no host copy this waits for the device."""
        return self.lens or tuple(self.cu_seqlens.diff().tolist())


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What attention kernels run over."""

    tiles: Tensor  # [NT, 2]: the tiles of the rows behind the decodes, see `tile_table`
    parts: Tensor  # [NP, 3]: the parts of the decode rows, see `KeySplits`
    part_ptr: Tensor  # [num_decodes + 1]: row r's parts are [part_ptr[r], part_ptr[r+1])
    lead: Tensor | None = None  # [num_decodes]: of up to `folded` rows that follow each other the one with their parts
    folded: int = 1


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """Where this step's `T` tokens of `N` rows go, and what each row attends to.

    Row `r` owns queries `[cu_queries[r], cu_queries[r+1])`, the last of its `kv_lens[r]` tokens; block `i` of
    its tokens is `block_table[table_rows[r], i]`. The first `num_decodes` rows have one query each.
    `slot_mapping[t]` = block * block_size + offset of token `t`, or -1 for a token that is stored elsewhere or
    not at all. Decode rows do not see keys before `first_key`; with one there are no other rows.
    """

    num_decodes: int
    cu_queries: Tensor  # [N + 1]
    kv_lens: Tensor  # [N]
    block_table: Tensor  # [lines, max_blocks]
    table_rows: Tensor  # [N]
    slot_mapping: Tensor  # [T] int64
    query_lens: tuple[int, ...] = ()  # host copies
    host_kv_lens: tuple[int, ...] = ()
    work: AttentionWork | None = None  # for kernels that run over tiles and parts
    first_key: int = 0

    def on_host(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(query lengths, key lengths) of the rows; where there are no host copies this waits for the device."""
        if self.query_lens:
            return self.query_lens, self.host_kv_lens
        return tuple(self.cu_queries.diff().tolist()), tuple(self.kv_lens.tolist())

    def without(self, rows: Sequence[int]) -> AttentionIndex:
        """For kernels over tiles: the same, but for the tiles of those rows."""
        assert self.work is not None
        tiles = self.work.tiles
        for row in rows:
            tiles = tiles.masked_fill(tiles[:, :1] == row, -1)
        return replace(self, work=replace(self.work, tiles=tiles))
