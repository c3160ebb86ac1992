"""The index arrays of a step, padded to a shape, and the context that a model sees of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.models.context import ForwardContext, LayerCache
from forkpoint.ops.metadata import (
    TILE,
    AttentionIndex,
    AttentionWork,
    KeySplits,
    RecordIndex,
    VerifyIndex,
    running_total,
    tile_table,
)
from forkpoint.ops.rows.columns import LateColumns
from forkpoint.platforms.packing import Arrays, Tensors
from forkpoint.runtime.block_table import BlockTable
from forkpoint.runtime.records import TokenRecords
from forkpoint.runtime.row_images import RowImages
from forkpoint.runtime.state_operators import KINDS, StateOperators
from forkpoint.sched.plan import NO_ROW, NO_SLOT, TO_DRAFT, IntArray, StepPlan, StepRows

# Lengths of queries and of keys of all rows, decodes first; empty if only the device has them.
HostLens = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step, or the sizes that it is padded to. Graphs are keyed by it."""

    num_decodes: int  # tokens of decode rows, drafts included
    num_prefill_tokens: int
    num_segments: int
    num_verified: int = 0  # decode rows, if the operators that verify drafts serve them; else 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_segments

    @classmethod
    def of(cls, plan: StepPlan, verifies: bool = False) -> StepShape:
        """Return the exact shape of a plan. `verifies`: operators that verify drafts serve its decode rows."""
        decodes = int(plan.rows.num_tokens[: plan.num_decodes].sum())
        segments = len(plan.rows.row) - plan.num_decodes
        return cls(decodes, plan.num_tokens - decodes, segments, plan.num_decodes if verifies else 0)


class StepBuilder:
    """Makes the input arrays of plans. The block table has to be up to date with the plan.

    Padding consists of decode rows and segments without tokens, which read and write nothing; of tokens that are stored
    nowhere; of samples that go to the spare row `table.num_rows`; and of list entries of row -1.
    """

    def __init__(
        self,
        table: BlockTable,
        has_kv: bool,
        splits: KeySplits | None,
        copies: bool = False,
        records: TokenRecords | None = None,
        most_drafts: int = 0,
        images: RowImages | None = None,
        tables: Mapping[int | None, BlockTable] = MappingProxyType({}),
    ) -> None:
        """`splits` makes the work lists of a device's kernels; None: there are none.

        `copies`: some operators need their states copied first. `records` is given if drafts are verified or states are
        written every few tokens only. `most_drafts` of a row come from DraftGraphs; 0: none do. `images` of rows change
        the positions by which tokens are rotated. `tables` are those of each window, `table` among them.
        """
        self._windows = {width: each for width, each in tables.items() if width is not None and each is not table}
        self._table, self._has_kv, self._splits, self._copies = table, has_kv, splits, copies
        self._records, self._most_drafts, self._images = records, most_drafts, images
        self._folded = 1
        if splits is not None:
            self._folded = splits.folded

    def padding(self, shape: StepShape) -> Arrays:
        """Return a step of nothing but padding, whose arrays are as large as those of any step of the shape."""
        arrays = self.build(StepPlan(0), shape, recorded=True)
        most = 0
        if self._splits is not None:
            most = self._splits.most(shape.num_decodes, self._table.max_entries_per_row)
        arrays["parts"] = np.full((most, 3), NO_ROW, np.int32)
        return arrays

    def build(self, plan: StepPlan, shape: StepShape, recorded: bool) -> Arrays:
        """Return the arrays that `context` reads, and `token_ids`, `token_rows`, `sampled`, `sampled_rows`.

        They are padded to `shape`. In a `recorded` step all arrays except `parts` have the sizes that `padding` gives
        them; `parts` may be shorter.
        """
        rows, lens = plan.rows, plan.rows.num_tokens
        offsets = running_total(lens)
        decodes = int(offsets[plan.num_decodes])
        positions = np.repeat(rows.start - offsets[:-1], lens) + np.arange(plan.num_tokens)
        table_rows = np.repeat(rows.row, lens)
        # Padding of the decode rows moves the tokens of segments back by `gap`.
        gap, num_tokens = shape.num_decodes - decodes, shape.num_tokens
        slots = np.full_like(positions, NO_SLOT)
        if self._has_kv:
            slots = self._table.kv_slots(table_rows, positions)
        last = sampled_tokens(rows)
        num_samples = len(last)
        if recorded:
            num_samples = shape.num_rows
        arrays: Arrays = {
            "token_ids": _spread(rows.tokens.astype(np.int64), num_tokens, decodes, gap, 0),
            "positions": _spread(positions, num_tokens, decodes, gap, 0),
            "slot_mapping": _spread(slots, num_tokens, decodes, gap, NO_SLOT),
            "token_rows": padded(table_rows[:decodes].astype(np.int64), shape.num_decodes, self._table.num_rows),
            "sampled": padded(last + gap * (last >= decodes), num_samples, 0),
            "sampled_rows": padded(plan.sampled_rows.astype(np.int64), num_samples, self._table.num_rows),
        }
        if self._images is not None:
            arrays["rope_shift"] = _spread(self._images.shifts(rows), num_tokens, decodes, gap, 0)
        if self._windows:
            arrays["token_lines"] = _spread(table_rows.astype(np.int64), num_tokens, decodes, gap, NO_ROW)
        arrays |= self._segments(rows, plan.num_decodes, shape, recorded)
        if self._records is not None:
            num_rows = shape.num_verified or shape.num_decodes

            def pad(column: IntArray, fill: int) -> IntArray:
                return padded(column, num_rows, fill)

            arrays |= self._records.arrays(plan, pad, shape.num_verified > 0)
            if shape.num_verified:
                arrays |= self._drafts(plan, shape, self._records.late(rows))
        # Attention sees each token of a decode row as a row of its own; it may read keys for several of them together.
        chunks = slice(plan.num_decodes, None)
        kv_lens = np.concatenate([positions[:decodes] + 1, (rows.start + lens)[chunks]]).astype(np.int32)
        table_rows = np.concatenate([table_rows[:decodes], rows.row[chunks]])
        arrays |= self._attention(lens[: plan.num_decodes], lens[chunks], kv_lens, table_rows, shape, recorded)
        return arrays

    def _drafts(self, plan: StepPlan, shape: StepShape, late: IntArray) -> Arrays:
        """Return the arrays of steps that verify drafts: places in `missed` (`late`), and sources of TO_DRAFT."""
        arrays: Arrays = {}
        if self._splits is not None or plan.rows.optimistic.any():  # always on a device: one form of its kernel
            own, spare = late[: plan.num_decodes].astype(np.int64), self._table.num_rows
            arrays["verify_late"] = padded(own, shape.num_verified, spare)
            lens = plan.rows.num_tokens[: plan.num_decodes]
            arrays["late"] = padded(np.repeat(own, lens), shape.num_decodes, spare)
        if self._most_drafts:
            at, row, number = draft_places(plan)
            arrays["draft_at"] = np.full(shape.num_decodes, -1, np.int64)
            arrays["draft_at"][at] = row * self._most_drafts + number
        return arrays

    def context(
        self, t: Tensors, shape: StepShape, caches: tuple[LayerCache, ...], operators: StateOperators, lens: HostLens
    ) -> ForwardContext:
        """Return the model's context from the arrays `t` on the device. `lens` are for operators on a CPU."""
        (query_lens, kv_lens), work, verify, record = lens, None, None, None
        if "parts" in t:
            folded: tuple[Tensor, int] | tuple[()] = ()
            if "lead" in t:
                folded = (t["lead"], self._folded)
            work = AttentionWork(t["query_tiles"], t["parts"], t["part_ptr"], *folded)
        if shape.num_verified:
            rows = (t["row_src"], t["row_dst"], t["row_cu_tokens"], t["verify_pending"])
            marks = (t["verify_mark"], t["verify_mark_dst"])
            verify = VerifyIndex(*rows, *marks, t["verify_read"], t["verify_write"], t["verify_line"])
        if self._records is not None and "record_line" in t:
            rows = (t["row_src"], t["row_dst"], t["row_cu_tokens"], t["record_line"])
            written = (t["record_written"], t["record_held"])
            marks = (t["record_mark"], t["record_mark_dst"])
            record = RecordIndex(self._records.interval, *rows, *written, *marks)
        attention = AttentionIndex(
            shape.num_decodes,
            t["cu_queries"],
            t["kv_lens"],
            self._table.device,
            t["table_rows"],
            t["slot_mapping"],
            query_lens,
            kv_lens,
            work,
        )
        decode, prefill = operators.indices(t, query_lens[shape.num_decodes :])
        return ForwardContext(t["positions"], shape.num_decodes, attention, decode, prefill, caches, verify, record)

    def with_windows(self, context: ForwardContext, t: Tensors) -> ForwardContext:
        """Return the context with the blocks of each window. Positions must have been corrected.

        Where tokens are stored is looked up on the device, because only the device has the positions of rows whose
        drafts may be rejected.
        """
        windows: dict[int, AttentionIndex] = {}
        for width, table in self._windows.items():
            lines, size = t["token_lines"], table.kernel_block_size
            blocks = table.device[lines.clamp(min=0), t["positions"] // size].long()
            slots = torch.where(lines >= 0, blocks * size + t["positions"] % size, NO_SLOT)
            windows[width] = replace(context.attention, block_table=table.device, slot_mapping=slots)
        return replace(context, windows=windows) if windows else context

    def late(self, t: Tensors) -> LateColumns | None:
        """Return the tensors that the operator `catch_up` corrects in place; None without optimistic rows.

        It takes rejected drafts off positions and lengths, once for each step.
        """
        if "late" not in t:
            return None
        assert self._records is not None
        names = ("positions", "kv_lens", "slot_mapping", "table_rows")
        positions, kv_lens, slots, rows = (t[name][: len(t["late"])] for name in names)
        keys = (slots if self._has_kv else None, rows, self._table.device, self._table.kernel_block_size)
        records = (t["verify_late"], t["verify_pending"], t.get("record_held"))
        return LateColumns(self._records.missed, t["late"], positions, kv_lens, *keys, *records)

    def _segments(self, rows: StepRows, decodes: int, shape: StepShape, recorded: bool) -> Arrays:
        """Return the slots that state operators read and write, and the segments' boundaries and saves.

        TokenRecords has the slots that decode rows save to.
        """
        count, lens, first = shape.num_segments, rows.num_tokens[decodes:], rows.save_ptr[decodes]
        pointers = rows.save_ptr[decodes:] - first
        saved = rows.save_positions[first:] - np.repeat(rows.start[decodes:], np.diff(pointers))
        capacity = len(saved)
        if recorded:
            capacity = _most_tiles(shape)
        arrays: Arrays = {
            "cu_seqlens": running_total(padded(lens, count, 0)),
            "decode_src": padded(rows.read_slot[:decodes], shape.num_decodes, NO_SLOT),
            "decode_dst": padded(rows.write_slot[:decodes], shape.num_decodes, NO_SLOT),
            "prefill_src": padded(rows.read_slot[decodes:], count, NO_SLOT),
            "prefill_dst": padded(rows.write_slot[decodes:], count, NO_SLOT),
            "save_ptr": padded(pointers, count + 1, len(saved)),
            "save_pos": padded(saved, capacity, 0),
            "save_dst": padded(rows.save_slots[first:], capacity, NO_SLOT),
        }
        if self._copies:
            for kind in KINDS:
                src, dst = arrays[f"{kind}_src"], arrays[f"{kind}_dst"]
                arrays[f"{kind}_placed"] = np.where(dst >= 0, dst, src)
        if self._splits is not None:
            arrays["segment_tiles"] = _tiles(tile_table(lens), shape, recorded)
        return arrays

    def _attention(
        self, decoding: IntArray, lens: IntArray, kv_lens: IntArray, rows: IntArray, shape: StepShape, recorded: bool
    ) -> Arrays:
        """Return the arrays of attention.

        `decoding` are the numbers of tokens of the decode rows, `lens` those of the segments. `kv_lens` and `rows` are
        for each token of a decode row, then for each segment.
        """
        num_decodes, num_rows = int(decoding.sum()), shape.num_rows
        gap = shape.num_decodes - num_decodes
        queries = np.concatenate([np.ones(shape.num_decodes, np.int32), padded(lens, shape.num_segments, 0)])
        arrays: Arrays = {
            "cu_queries": running_total(queries),
            "kv_lens": _spread(kv_lens, num_rows, num_decodes, gap, 0),
            "table_rows": _spread(rows, num_rows, num_decodes, gap, 0),
        }
        if self._splits is not None:
            arrays["query_tiles"] = _tiles(tile_table(lens, shape.num_decodes), shape, recorded)
            if self._folded > 1 and shape.num_verified:
                parts, pointers, lead = self._splits.folded_table(kv_lens[:num_decodes], decoding)
                arrays["lead"] = np.concatenate([lead, np.arange(num_decodes, shape.num_decodes, dtype=np.int32)])
            else:
                parts, pointers = self._splits.table(kv_lens[:num_decodes])
            arrays["part_ptr"] = padded(pointers, shape.num_decodes + 1, int(pointers[-1]))
            arrays["parts"] = parts
        return arrays


def draft_places(plan: StepPlan) -> tuple[npt.NDArray[np.int64], IntArray, IntArray]:
    """Return the drafts that a plan leaves to the runner: the index of the token, its row, its number in the row.

    Numbers count from 0.
    """
    at = np.flatnonzero(plan.rows.tokens == TO_DRAFT)
    offsets = running_total(plan.rows.num_tokens)
    owner = np.searchsorted(offsets, at, side="right") - 1
    return at, plan.rows.row[owner], (at - offsets[owner] - 1).astype(np.int32)


def _most_tiles(shape: StepShape) -> int:
    """Return how many tiles the segments of such a step can have, which is also how many states they can save."""
    return shape.num_prefill_tokens // TILE + shape.num_segments


def _tiles(tiles: IntArray, shape: StepShape, recorded: bool) -> IntArray:
    """Return a list of tiles, in a recorded step padded to the most that its shape can have."""
    if not recorded:
        return tiles
    return padded(tiles, _most_tiles(shape), NO_ROW)


def padded(values: npt.NDArray[Any], count: int, fill: int) -> npt.NDArray[Any]:
    """Return the values as `[count, ...]`, filled up with `fill`. There must not be more than `count`."""
    if len(values) == count:
        return np.ascontiguousarray(values)
    out = np.full((count, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out


def sampled_tokens(rows: StepRows) -> npt.NDArray[np.int64]:
    """Return the tokens after which the plan samples: each sampled row's last one, and that before each draft.

    They are indices among the step's tokens.
    """
    last = np.cumsum(rows.num_tokens)[rows.samples].astype(np.int64) - 1
    counts = 1 + rows.num_drafts[rows.samples]
    return last if len(last) == int(counts.sum()) else ranges(last + 1 - counts, counts)


def ranges(starts: npt.NDArray[np.integer], counts: IntArray) -> npt.NDArray[np.int64]:
    """Return the ranges `[starts[i], starts[i] + counts[i])`, one after the other."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def _spread(values: npt.NDArray[Any], count: int, num_decodes: int, gap: int, fill: int) -> npt.NDArray[Any]:
    """Return the values of decode tokens, `gap` times `fill`, those of segments, then `fill` up to `count`."""
    if len(values) == count:
        return values
    out = np.full(count, fill, values.dtype)
    out[:num_decodes] = values[:num_decodes]
    out[num_decodes + gap : len(values) + gap] = values[num_decodes:]
    return out
