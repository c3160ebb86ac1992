"""Index tensors of one step, built once on the host and shared by all layers.

Row order is the same everywhere: decode rows first, then prefill segments. Slot -1 as `src` is the zero state; -1 as
`dst` stores nothing. Index tensors are int32 unless a comment says otherwise.

A step may be padded so that a recorded graph can run it. Padded decode rows and segments have `src = dst = -1` and no
tokens, keys or parts; padded list entries have row -1. Kernels read varying sizes from the device. Host copies (`lens`,
`query_lens`, `host_kv_lens`) serve operators on the host. They are empty for an index on another device; `on_host`
then reads the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forkpoint.ops.deal import Deal
from forkpoint.ops.ranks import Ranks

TILE = 64  # tokens of one row per tile of a tiled kernel
PART_BLOCKS = 2  # blocks of keys in the smallest part of a decode row
SHORT_BLOCKS = 8  # blocks; longer rows have parts of twice PART_BLOCKS, so that loads of one program overlap
MAX_PARTS = 64  # parts of one decode row

IntArray = npt.NDArray[np.int32]


def tile_table(lens: IntArray, first_row: int = 0) -> IntArray:
    """Return `[NT, 2]` int32: (row, offset of its first token in the row) of every 64-token tile.

    Rows have `lens` tokens each, and are numbered from `first_row` on.
    """
    tiles = [(row, start) for row, count in enumerate(lens.tolist(), first_row) for start in range(0, count, TILE)]
    return np.asarray(tiles, np.int32).reshape(len(tiles), 2)


@dataclass(frozen=True, slots=True)
class KeySplits:
    """Splits the keys of decode rows into parts, which programs attend to in parallel.

    With `wanted`, a step has about that many parts, distributed to its rows by their lengths. Without it, a row's
    parts, and therefore its bits, depend on its own length alone. `folded` is the number of consecutive tokens of a row
    that share one pass over their keys.
    """

    block_size: int = TILE
    wanted: int | None = None
    folded: int = 1

    def table(self, kv_lens: IntArray) -> tuple[IntArray, IntArray]:
        """Return the parts `[NP, 3]` (row, first block, end block) and each row's first part `[N + 1]`."""
        if not len(kv_lens):
            return np.empty((0, 3), np.int32), np.zeros(1, np.int32)
        blocks = -(-kv_lens.astype(np.int64) // self.block_size)
        sizes = self._sizes(blocks)
        counts = -(-blocks // sizes)
        pointers = running_total(counts)
        rows = np.repeat(np.arange(len(kv_lens)), counts)
        first = (np.arange(len(rows)) - pointers[rows]) * sizes[rows]
        end = np.minimum(first + sizes[rows], blocks[rows])
        return np.stack([rows, first, end], axis=1).astype(np.int32), pointers

    def folded_table(self, kv_lens: IntArray, lens: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return `table` for rows with `lens` tokens, each of which sees `kv_lens[N]` keys, and each token's lead
        `[N]`.

        The lead is the first of the tokens that are folded together; its parts serve all of them."""
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
        """Return the most parts that a step of `num_rows` rows of up to `max_blocks` blocks can have."""
        if self.wanted is not None:
            return min(num_rows * min(MAX_PARTS, -(-max_blocks // PART_BLOCKS)), num_rows + self.wanted)
        blocks = np.arange(1, max_blocks + 1)
        return num_rows * int(np.max(-(-blocks // self._sizes(blocks))))

    def _sizes(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of blocks in each part of each row."""
        if self.wanted is None:
            long = PART_BLOCKS * 2
            return np.where(blocks <= SHORT_BLOCKS, PART_BLOCKS, long * np.maximum(1, -(-blocks // (MAX_PARTS * long))))
        smallest = np.minimum(-(-blocks // PART_BLOCKS), MAX_PARTS)
        counts = np.minimum(blocks * self.wanted // max(1, int(blocks.sum())), smallest)
        return np.maximum(1, -(-blocks // np.maximum(1, counts)))


def running_total(lens: Sequence[int] | npt.NDArray[np.integer]) -> IntArray:
    """Return the cumulative sums with a leading zero, `[n + 1]`."""
    out = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(np.asarray(lens, np.int32), out=out[1:])
    return out


def ranges(starts: npt.NDArray[np.integer], counts: IntArray) -> npt.NDArray[np.int64]:
    """Return the ranges `[starts[i], starts[i] + counts[i])`, one after the other."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


class _Rows:
    """Base of the indexes that name the slots each row reads and writes."""

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
    """Describes `B` rows of one or more tokens, of which the first is certain and the others are drafts.

    1. Row `b` folds: the operator advances the state of slot `src[b]` by the first `pending[b]` tokens, whose records
       are in line `read[b]`. After `mark[b]` of them (0: never) it also stores the state in slot `mark_dst[b]`. For an
       optimistic row, the mark may lie beyond the pending tokens; that slot's contents then mean nothing.
    2. It computes the row's tokens `[cu_tokens[b], cu_tokens[b + 1])`.
    3. A row with one token stores the state after it in slot `dst[b]`. A row with drafts stores the state before its
       tokens there, and a record of each token in line `write[b]`.

    Records that only the program that wrote them reads, such as a channel's inputs, use one line for both, `line[b]`.
    A padded row has no tokens and `src = dst = -1`. Tokens after the last row's are padding; their outputs are zero.
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
        """The columns that kernels read, in the order of their arguments."""
        return [getattr(self, name) for name in self.__slots__[:-1]]

    @property
    def single_columns(self) -> list[Tensor]:
        """`columns` for records that are read and written in one line."""
        return [*self.columns[:-2], self.line, self.line]


@dataclass(frozen=True, slots=True)
class RecordIndex(_Rows):
    """Describes `B` rows of one or more tokens whose states are written at multiples of `interval` tokens.

    A row's first token is certain and the others are drafts. Slot `src[b]` holds the state after `written[b]` tokens,
    and line `line[b]` holds records of the `held[b]` tokens that follow them.

    1. If these tokens reach a multiple of the interval, the operator folds the records up to the last such multiple and
       stores the state in slot `dst[b]`. After `mark[b]` of them (0: never) it also stores the state in slot
       `mark_dst[b]`. For an optimistic row, the mark may lie beyond the records. If nothing is folded, the
       state is copied to `dst[b]` if that is another slot.
    2. It computes the row's tokens `[cu_tokens[b], cu_tokens[b + 1])`. Each token leaves a record.

    A record lies at its position modulo the line's length. A padded row has no tokens and `src = dst = -1`. Tokens
    after the last row's are padding; their outputs are zero.
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
        """The columns that kernels read, in the order of their arguments."""
        return [getattr(self, name) for name in self.__slots__[1:]]


@dataclass(frozen=True, slots=True)
class SegmentIndex(_Rows):
    """Describes `N` prefill segments, laid end to end.

    Segment `n` reads its initial state from slot `src[n]` and writes its final state to slot `dst[n]`. Its saves are
    the entries `[save_ptr[n], save_ptr[n+1])`: after `save_pos[e]` tokens of the segment the state is also stored in
    slot `save_dst[e]`. Positions ascend, and each is a multiple of 64 from the segment's start or the segment's length.
    Within one launch no slot is written twice, and no slot that a row reads is written by another row or by a save.
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
        """The columns that kernels read, in the order of their arguments."""
        return [self.cu_seqlens, self.src, self.dst, self.save_ptr, self.save_pos, self.save_dst]

    def on_host(self) -> tuple[int, ...]:
        """Return the segments' lengths. Waits for the device if there is no host copy."""
        return self.lens or tuple(self.cu_seqlens.diff().tolist())


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The tiles and parts that attention kernels run over."""

    tiles: Tensor  # [NT, 2]: the tiles of the prefill rows, see `tile_table`
    parts: Tensor  # [NP, 3]: the parts of the decode rows, see `KeySplits`
    part_ptr: Tensor  # [num_decodes + 1]: row r's parts are [part_ptr[r], part_ptr[r+1])
    lead: Tensor | None = None  # [num_decodes]: the row whose parts serve a row and up to `folded - 1` rows after it
    folded: int = 1


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """Says where the `T` tokens of this step's `N` rows are stored, and which keys each row attends to.

    Row `r` owns the queries `[cu_queries[r], cu_queries[r+1])`, which are the last of its `kv_lens[r]` tokens. Block
    `i` of its tokens is `block_table[table_rows[r], i]`. The first `num_decodes` rows have one query each.
    `key_places[t]` is block * block_size + offset of token `t`, or -1 for a token that is not stored here. Decode
    rows do not see keys before `first_key`; a step with a `first_key` has only decode rows.
    """

    num_decodes: int
    cu_queries: Tensor  # [N + 1]
    kv_lens: Tensor  # [N]
    block_table: Tensor  # [lines, max_blocks]
    table_rows: Tensor  # [N]
    key_places: Tensor  # [T] int64
    query_lens: tuple[int, ...] = ()  # host copies
    host_kv_lens: tuple[int, ...] = ()
    work: AttentionWork | None = None  # for kernels that run over tiles and parts
    first_key: int = 0
    dealt: DealtIndex | None = None  # if ranks keep the keys in turn; then this index only says where tokens are stored

    def on_host(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (query lengths, key lengths) of the rows. Waits for the device if there are no host copies."""
        if self.query_lens:
            return self.query_lens, self.host_kv_lens
        return tuple(self.cu_queries.diff().tolist()), tuple(self.kv_lens.tolist())

    def part(self, first: int, end: int) -> AttentionIndex:
        """Return the index of the rows `[first, end)` and their queries alone, without `work`. It needs host copies."""
        return replace(
            self,
            num_decodes=min(max(0, self.num_decodes - first), end - first),
            cu_queries=self.cu_queries[first : end + 1] - sum(self.query_lens[:first]),
            kv_lens=self.kv_lens[first:end],
            table_rows=self.table_rows[first:end],
            query_lens=self.query_lens[first:end],
            host_kv_lens=self.host_kv_lens[first:end],
            work=None,
        )

    def without(self, rows: Sequence[int]) -> AttentionIndex:
        """Return a copy without the tiles of `rows`, for kernels that run over tiles."""
        assert self.work is not None
        tiles = self.work.tiles
        for row in rows:
            tiles = tiles.masked_fill(tiles[:, :1] == row, -1)
        return replace(self, work=replace(self.work, tiles=tiles))


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Consecutive rows whose keys are gathered from all ranks of a group.

    `index` describes the rows alone, as if the gathered keys were the cache, in blocks of `block_size` tokens. The rank
    contributes its kernel blocks `blocks`, `ratio` of them for each of the rows' blocks.
    """

    tokens: slice  # of the rows, in the step
    blocks: Tensor  # [B * ratio] int64
    ratio: int
    block_size: int
    index: AttentionIndex


@dataclass(frozen=True, slots=True)
class DealtIndex:
    """Says which rows of an index whose keys are dealt attend to what.

    The first `local.num_decodes` rows attend to the keys that each rank keeps, and the ranks merge the results. `local`
    has as `kv_lens` the number of each row's keys that this rank keeps; None: there are no such rows. The keys of the
    other rows are gathered.
    """

    deal: Deal
    ranks: Ranks  # that keep the tokens in turn
    kv_lens: Tensor  # [num_decodes]: the keys of all ranks that the decode rows see
    local: AttentionIndex | None
    gathered: tuple[GatheredRows, ...] = ()

    def first_keys(self, window: int) -> Tensor:
        """Return for each decode row the rank's first key that lies within the `window` of the row, `[num_decodes]`."""
        return self.deal.count((self.kv_lens - window).clip(min=0))
