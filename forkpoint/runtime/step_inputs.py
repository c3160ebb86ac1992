"""The index arrays of a step, padded to a shape, and the context that a model sees of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forkpoint.models.context import ForwardContext, LayerCache
from forkpoint.ops.metadata import (
    TILE,
    AttentionIndex,
    AttentionWork,
    DecodeIndex,
    KeySplits,
    RecordIndex,
    SegmentIndex,
    VerifyIndex,
    ranges,
    running_total,
    tile_table,
)
from forkpoint.ops.rows.columns import OptimisticColumns
from forkpoint.platforms.packing import Arrays, Tensors
from forkpoint.runtime.block_table import NO_PLACE, BlockTable
from forkpoint.runtime.dealt_keys import DealtKeys, HostLens
from forkpoint.runtime.records import Columns, TokenRecords
from forkpoint.runtime.row_images import RowImages, StepImages
from forkpoint.runtime.state_operators import KINDS, Sources
from forkpoint.sched.plan import NO_ROW, NO_SLOT, TO_DRAFT, IntArray, StepPlan, StepRows

# Columns with an entry for each decode token, then one for each token of the segments or for each segment.
_WITH_SEGMENTS: Final = frozenset(
    {"token_ids", "positions", "key_places", "rope_shift", "draft_shift", "token_lines", "kv_lens", "table_rows"}
)


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

    @property
    def most_tiles(self) -> int:
        """The most tiles that the segments can have, which is also how many states they can save."""
        return self.num_prefill_tokens // TILE + self.num_segments

    @classmethod
    def of(cls, plan: StepPlan, verifies: bool = False) -> StepShape:
        """Return the exact shape of a plan. `verifies`: operators that verify drafts serve its decode rows."""
        decodes = int(plan.rows.num_tokens[: plan.num_decodes].sum())
        segments = len(plan.rows.row) - plan.num_decodes
        return cls(decodes, plan.num_tokens - decodes, segments, plan.num_decodes if verifies else 0)


class StepBuilder:
    """Builds the input arrays of plans. The block table has to be up to date with the plan.

    Decode rows and segments of padding have no tokens, and read and write nothing. Tokens of padding are stored
    nowhere. Samples of padding go to the spare row `table.num_rows`. List entries of padding have the row -1.
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
        dealt: DealtKeys | None = None,
    ) -> None:
        """`splits` makes the work lists of a device's kernels; None: the operators need no lists.

        `copies`: some operators need their states copied first. `records` is given if drafts are verified or states are
        written only every few tokens. DraftGraphs computes up to `most_drafts` drafts of a row. `images` is None if the
        model reads none. `tables` are the batch's block tables by window, `table` among them. `dealt` is given if the
        tokens of `table` are dealt to ranks.
        """
        self._windows = {width: each for width, each in tables.items() if width is not None and each is not table}
        self._table, self._has_kv, self._splits, self._copies = table, has_kv, splits, copies
        self._records, self._most_drafts, self._images, self._dealt = records, most_drafts, images, dealt
        self._folded = 1
        if splits is not None:
            self._folded = splits.folded

    def padding(self, shape: StepShape) -> Arrays:
        """Return a step of nothing but padding, whose arrays are as large as those of any step of the shape."""
        plan, most = StepPlan(0), 0
        images = StepImages() if self._images is None else self._images.step(plan.rows, recorded=True)
        arrays = self.build(plan, shape, True, images)
        if self._splits is not None:
            most = self._splits.most(shape.num_decodes, self._table.max_entries_per_row)
        arrays["parts"] = np.full((most, 3), NO_ROW, np.int32)
        return arrays

    def build(self, plan: StepPlan, shape: StepShape, recorded: bool, images: StepImages | None = None) -> Arrays:
        """Return the arrays that `context` reads, and `token_ids`, `token_rows`, `sampled`, `sampled_rows`.

        They are padded to `shape`. In a `recorded` step all arrays except `parts` have the sizes that `padding` gives
        them; `parts` may be shorter.
        """
        rows, lens = plan.rows, plan.rows.num_tokens
        offsets, spare, num_rows = running_total(lens), self._table.num_rows, shape.num_rows
        decodes = int(offsets[plan.num_decodes])
        positions = np.repeat(rows.start - offsets[:-1], lens) + np.arange(plan.num_tokens)
        table_rows = np.repeat(rows.row, lens)
        # Padding of the decode rows moves the tokens of segments back by `gap`.
        gap, num_tokens = shape.num_decodes - decodes, shape.num_tokens
        places = np.full_like(positions, NO_PLACE)
        if self._has_kv:
            places = self._table.key_places(table_rows, positions)
        last = sampled_tokens(rows)
        sampled_rows = np.full(len(last), spare, np.int64)  # the operator `accept` stores the ids of rows with drafts
        sampled_rows[: len(plan.sampled_rows)] = plan.sampled_rows
        columns: Columns = {
            "token_ids": (rows.tokens.astype(np.int64), num_tokens, 0),
            "positions": (positions, num_tokens, 0),
            "key_places": (places, num_tokens, NO_PLACE),
            "token_rows": (table_rows[:decodes].astype(np.int64), shape.num_decodes, spare),
            "sampled": (last + gap * (last >= decodes), num_rows, 0),
            "sampled_rows": (sampled_rows, num_rows, spare),
        }
        if images is not None:
            columns |= {name: (values, num_tokens, 0) for name, values in images.columns.items()}
        if self._windows or self._dealt is not None:
            columns["token_lines"] = (table_rows.astype(np.int64), num_tokens, NO_ROW)
        columns |= self._segments(rows, plan.num_decodes, shape)
        if self._records is not None:
            columns |= self._records.columns(plan, shape.num_verified or shape.num_decodes, shape.num_verified > 0)
            if shape.num_verified:
                columns |= self._drafts(plan, shape, self._records.rejected_at(rows))
        # Attention sees each token of a decode row as a row of its own; it may read keys for several of them together.
        chunks = slice(plan.num_decodes, None)
        kv_lens = np.concatenate([positions[:decodes] + 1, (rows.start + lens)[chunks]]).astype(np.int32)
        table_rows = np.concatenate([table_rows[:decodes], rows.row[chunks]])
        columns |= self._attention(lens[: plan.num_decodes], lens[chunks], kv_lens, table_rows, shape)
        if recorded:
            return _padded(columns, decodes, gap)
        return {name: values for name, (values, _, _) in columns.items()}

    def _drafts(self, plan: StepPlan, shape: StepShape, rejected_at: IntArray) -> Columns:
        """Return the columns of steps that verify drafts: places in `num_rejected`, and sources of TO_DRAFT."""
        columns: Columns = {}
        if self._splits is not None or plan.rows.optimistic.any():  # always on a device: one form of its kernel
            own, spare = rejected_at[: plan.num_decodes].astype(np.int64), self._table.num_rows
            columns["verify_rejected_at"] = (own, shape.num_verified, spare)
            lens = plan.rows.num_tokens[: plan.num_decodes]
            columns["rejected_at"] = (np.repeat(own, lens), shape.num_decodes, spare)
        if self._most_drafts:
            index, row, number = draft_places(plan)
            sources = np.full(shape.num_decodes, -1, np.int64)
            sources[index] = row * self._most_drafts + number
            columns["draft_at"] = (sources, shape.num_decodes, -1)
        return columns

    def context(
        self, t: Tensors, shape: StepShape, caches: tuple[LayerCache, ...], sources: Sources, lens: HostLens
    ) -> ForwardContext:
        """Return the model's context from the arrays `t` on the device.

        `sources` are those of StateOperators. `lens` are for operators on a CPU.
        """
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
            t["key_places"],
            query_lens,
            kv_lens,
            work,
        )
        saves = (t["save_ptr"], t["save_pos"], t["save_dst"], query_lens[shape.num_decodes :], t.get("segment_tiles"))
        decode = {name: DecodeIndex(t[source], t["decode_dst"]) for name, source in sources["decode"].items()}
        prefill = {
            name: SegmentIndex(t["cu_seqlens"], t[source], t["prefill_dst"], *saves)
            for name, source in sources["prefill"].items()
        }
        return ForwardContext(t["positions"], shape.num_decodes, attention, decode, prefill, caches, verify, record)

    def located(self, context: ForwardContext, t: Tensors, most: HostLens = ((), ())) -> ForwardContext:
        """Return the context with the blocks of each window, and of keys that are dealt, from `token_lines`.

        Positions must have been corrected. The device looks up where tokens are stored, because it alone has the
        positions of rows whose drafts may be rejected. `most` is that of `DealtKeys.complete`.
        """
        windows: dict[int, AttentionIndex] = {}
        for width, table in self._windows.items():
            places = table.device_key_places(t["token_lines"], t["positions"])
            windows[width] = replace(context.attention, block_table=table.device, key_places=places)
        if windows:
            context = replace(context, windows=windows)
        if self._dealt is None:
            return context
        places = self._table.device_key_places(t["token_lines"], t["positions"])
        attention = replace(context.attention, key_places=places)
        return replace(context, attention=self._dealt.complete(attention, self._table, most))

    def optimistic(self, t: Tensors) -> OptimisticColumns:
        """Return the tensors that the operator `catch_up` corrects in place, in a step with the array `rejected_at`.

        It takes rejected drafts off positions and lengths, once for each step.
        """
        assert self._records is not None
        names = ("positions", "kv_lens", "key_places", "table_rows")
        positions, kv_lens, places, rows = (t[name][: len(t["rejected_at"])] for name in names)
        looked_up = self._has_kv and self._dealt is None  # otherwise `located` looks them up
        keys = (places if looked_up else None, rows, self._table.device, self._table.kernel_block_size)
        records = (t["verify_rejected_at"], t["verify_pending"], t.get("record_held"))
        return OptimisticColumns(self._records.num_rejected, t["rejected_at"], positions, kv_lens, *keys, *records)

    def _segments(self, rows: StepRows, decodes: int, shape: StepShape) -> Columns:
        """Return the slots that state operators read and write, and the segments' boundaries, saves and tiles.

        Attention numbers the segments after all decode rows. TokenRecords has the slots that decode rows save to.
        """
        count, lens, first = shape.num_segments, rows.num_tokens[decodes:], rows.save_ptr[decodes]
        pointers, ends = rows.save_ptr[decodes:] - first, running_total(lens)
        saved = rows.save_positions[first:] - np.repeat(rows.start[decodes:], pointers[1:] - pointers[:-1])
        columns: Columns = {
            "cu_seqlens": (ends, count + 1, int(ends[-1])),
            "decode_src": (rows.read_slot[:decodes], shape.num_decodes, NO_SLOT),
            "decode_dst": (rows.write_slot[:decodes], shape.num_decodes, NO_SLOT),
            "prefill_src": (rows.read_slot[decodes:], count, NO_SLOT),
            "prefill_dst": (rows.write_slot[decodes:], count, NO_SLOT),
            "save_ptr": (pointers, count + 1, len(saved)),
            "save_pos": (saved, shape.most_tiles, 0),
            "save_dst": (np.ascontiguousarray(rows.save_slots[first:]), shape.most_tiles, NO_SLOT),
        }
        if self._copies:
            for kind in KINDS:
                (src, size, fill), (dst, _, _) = columns[f"{kind}_src"], columns[f"{kind}_dst"]
                columns[f"{kind}_placed"] = (np.where(dst >= 0, dst, src), size, fill)
        if self._splits is not None:
            tiles = tile_table(lens)
            columns["segment_tiles"] = (tiles, shape.most_tiles, NO_ROW)
            columns["query_tiles"] = (tiles + np.asarray([shape.num_decodes, 0], np.int32), shape.most_tiles, NO_ROW)
        return columns

    def _attention(
        self, decoding: IntArray, lens: IntArray, kv_lens: IntArray, rows: IntArray, shape: StepShape
    ) -> Columns:
        """Return the columns of attention.

        `decoding` and `lens` are the numbers of tokens of each decode row and of each segment. `kv_lens` and `rows`
        have an entry for each token of the decode rows, then one for each segment.
        """
        num_decodes, num_rows = len(kv_lens) - len(lens), shape.num_rows
        own_lens = kv_lens[:num_decodes]
        if self._dealt is not None:
            own_lens = self._dealt.deal.count(own_lens)
        queries = running_total(np.concatenate([np.ones(shape.num_decodes, np.int32), lens]))
        columns: Columns = {
            "cu_queries": (queries, num_rows + 1, int(queries[-1])),
            "kv_lens": (kv_lens, num_rows, 0),
            "table_rows": (rows, num_rows, 0),
        }
        if self._splits is not None:
            if self._folded > 1 and shape.num_verified:
                parts, pointers, lead = self._splits.folded_table(own_lens, decoding)
                lead = np.concatenate([lead, np.arange(num_decodes, shape.num_decodes, dtype=np.int32)])
                columns["lead"] = (lead, shape.num_decodes, 0)
            else:
                parts, pointers = self._splits.table(own_lens)
            columns["part_ptr"] = (pointers, shape.num_decodes + 1, int(pointers[-1]))
            columns["parts"] = (parts, len(parts), NO_ROW)
        return columns


def draft_places(plan: StepPlan) -> tuple[npt.NDArray[np.int64], IntArray, IntArray]:
    """Return the drafts that a plan leaves to the runner: the index of the token, its row, its number in the row.

    Numbers count from 0.
    """
    index = np.flatnonzero(plan.rows.tokens == TO_DRAFT)
    offsets = running_total(plan.rows.num_tokens)
    owner = np.searchsorted(offsets, index, side="right") - 1
    return index, plan.rows.row[owner], (index - offsets[owner] - 1).astype(np.int32)


def sampled_tokens(rows: StepRows) -> npt.NDArray[np.int64]:
    """Return the tokens after which the plan samples: each sampled row's last one, and that before each draft.

    They are indices among the step's tokens.
    """
    last = np.cumsum(rows.num_tokens)[rows.samples].astype(np.int64) - 1
    counts = 1 + rows.num_drafts[rows.samples]
    return last if len(last) == int(counts.sum()) else ranges(last + 1 - counts, counts)


def _padded(columns: Columns, num_decodes: int, gap: int) -> Arrays:
    """Return the columns in their padded sizes. `gap` entries of padding follow the `num_decodes` decode tokens."""
    arrays: Arrays = {}
    for name, (values, size, fill) in columns.items():
        arrays[name] = values
        if len(values) != size:
            first = num_decodes if name in _WITH_SEGMENTS else len(values)
            arrays[name] = out = np.empty((size, *values.shape[1:]), values.dtype)
            out.fill(fill)  # twice as fast as np.full
            out[:first] = values[:first]
            out[first + gap : len(values) + gap] = values[first:]
    return arrays
