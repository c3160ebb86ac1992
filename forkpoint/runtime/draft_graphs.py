"""Drafts by the model's MTP layer. They stay on the device; one graph computes all drafts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import CONV
from forkpoint.models.mtp import FIRST_KEY
from forkpoint.ops.metadata import AttentionIndex, AttentionWork, KeySplits, running_total
from forkpoint.ops.rows.columns import IdColumns, OptimisticColumns
from forkpoint.platforms.packing import Arrays, Tensors
from forkpoint.runtime.batch import Batch
from forkpoint.runtime.block_table import NO_PLACE
from forkpoint.runtime.dealt_keys import DealtKeys, HostLens
from forkpoint.runtime.graphs import Graphs
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.records import TokenRecords
from forkpoint.runtime.step_inputs import draft_places
from forkpoint.sched.plan import NO_ROW, TO_DRAFT, IntArray, StepPlan

_CORRECTED = ("token_ids", "positions", "kv_lens", "key_places")  # corrected on the device, in place


@dataclass(frozen=True, slots=True)
class _Shape:
    """A number of drafts for each of a number of rows."""

    num_rows: int
    num_drafts: int


class DraftGraphs:
    """Computes the drafts that plans leave to the runner (TO_DRAFT), with the model's MTP layer.

    `drafted[row, i]` is the row's i-th draft of the newest such step. The layer's keys of the drafts go where the step
    itself will write its keys. A row that wants fewer drafts than others stores nothing for the rest. If no graph is
    large enough, the work is launched kernel by kernel.
    """

    def __init__(self, loaded: Loaded, batch: Batch, records: TokenRecords, dealt: DealtKeys | None = None) -> None:
        """`dealt` is given if the tokens of the batch's first table are dealt to ranks."""
        self._model, self._ops, self._platform = loaded.model, loaded.ops, loaded.platform
        self._batch, self._records, self._dealt, self.most = batch, records, dealt, loaded.max_num_drafts
        self._layer, self._splits = len(self._model.config.layers), KeySplits(batch.table.kernel_block_size)
        lines = batch.table.num_rows + 1  # the last one is padding's
        self.drafted = torch.zeros((lines, self.most), dtype=torch.int64, device=self._platform.device)
        steps = [step for step in loaded.shapes if step.num_verified and not step.num_segments]
        rows = {step.num_verified for step in steps}
        drafts = {step.num_decodes // step.num_verified - 1 for step in steps}
        shapes = [_Shape(count, each) for count in sorted(rows)[::-1] for each in sorted(drafts)[::-1]]
        padding = {shape: self._padding(shape) for shape in shapes}
        self._graphs: Graphs[_Shape, None] = Graphs(self._platform, padding, loaded.runs_before_recording)

    def issue_all(self) -> None:
        """Compute drafts for padding in all shapes, without recording the work."""
        self._graphs.issue_all(self._issue)

    def record_largest(self) -> None:
        """Record the graph that computes the most drafts."""
        self._graphs.record_largest(self._issue)

    def record_next(self) -> bool:
        """Record a graph that no step has needed yet; return False if there is none."""
        return self._graphs.record_next(self._issue)

    def close(self) -> None:
        self._graphs.clear()

    def filled(self, plan: StepPlan, must_know: bool) -> StepPlan:
        """Compute the drafts that the plan leaves to the runner, on the device, and return the plan.

        Their ids enter the returned plan only if the host needs them (`must_know`), which then waits for the device, or
        if the device shares the host's memory.
        """
        rows = plan.rows
        first = running_total(rows.num_tokens)[:-1]
        to_draft = rows.tokens.take(first + 1, mode="clip") == TO_DRAFT
        chosen = np.flatnonzero((rows.num_drafts > 0) & to_draft)
        if not len(chosen):
            return plan
        rejected_at = self._records.rejected_at(rows)
        columns = (rows.row, rows.start, rows.num_drafts, rows.tokens[first], rows.read_slot, rows.pending, rejected_at)
        self._draft(*(column[chosen] for column in columns))
        return self.with_drafts(plan) if must_know or self._platform.shares_memory else plan

    def with_drafts(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the ids of its drafts. Waits for the device."""
        tokens, (index, row, number) = plan.rows.tokens.copy(), draft_places(plan)
        tokens[index] = self.drafted.cpu().numpy()[row, number]
        return replace(plan, rows=replace(plan.rows, tokens=tokens))

    def _draft(self, *columns: IntArray) -> None:
        """Compute drafts for rows, given as the columns of `_arrays`, by a graph if one fits."""
        row, _, counts, *_ = columns
        exact = _Shape(len(row), int(counts.max()))
        shapes = self._graphs.shapes
        fitting = [s for s in shapes if s.num_rows >= exact.num_rows and s.num_drafts >= exact.num_drafts]
        if fitting:
            shape = min(fitting, key=lambda s: s.num_rows * s.num_drafts)
            self._graphs.replay(shape, self._arrays(shape, columns), self._issue)
        else:
            arrays = self._arrays(exact, columns)
            lens = [((1,) * exact.num_rows, tuple(each)) for each in arrays["kv_lens"].tolist()]
            self._issue(self._platform.upload_all(arrays), exact, lens)

    def _padding(self, shape: _Shape) -> Arrays:
        arrays = self._arrays(shape, [np.empty(0, np.int32)] * 7)
        most = self._splits.most(shape.num_rows, self._batch.table.max_entries_per_row)
        arrays["parts"] = np.full((most, 3), NO_ROW, np.int32)
        return arrays

    def _arrays(self, shape: _Shape, columns: Sequence[IntArray]) -> Arrays:
        """Return the inputs for these rows, padded to `shape`.

        Columns: row, start, number of drafts, id of the newest token (LAST_SAMPLED: on the device), slot that the row
        reads, tokens pending there, index in `TokenRecords.num_rejected`.
        """
        row, start, counts, token_ids, slot, pending, rejected_at = columns
        table, most, pad = self._batch.table, shape.num_drafts, shape.num_rows - len(row)
        number = np.arange(most, dtype=np.int32)[:, None]
        positions = (start + np.minimum(number, counts - 1)).astype(np.int64)  # [most, rows]
        places = table.key_places(np.tile(row, most), positions.ravel()).reshape(positions.shape)
        # All drafts share one list of parts, that of the last draft. Some of its parts are empty for earlier ones.
        parts, pointers = self._splits.table(table.deal.count(positions[-1] + 1))

        def padded(values: np.ndarray, fill: int, dtype: type = np.int64) -> np.ndarray:
            out = np.full((*values.shape[:-1], values.shape[-1] + pad), fill, dtype)
            out[..., : values.shape[-1]] = values
            return out

        images, optional = self._batch.images, Arrays()
        if self._dealt is not None:
            optional["lines"] = padded(np.where(number < counts, row, NO_ROW), NO_ROW)
        if images is not None and images.has_axes:
            optional["rope_shift"] = padded(images.shift[row], 0)
        return {
            **optional,
            "rows": padded(row, table.num_rows),
            "token_ids": padded(token_ids, 0),
            "slots": padded(slot, 0),
            "line": padded(row, 0),
            "pending": padded(pending, 0),
            "rejected_at": padded(rejected_at, table.num_rows),
            "positions": padded(positions, 0),
            "key_places": padded(np.where(number < counts, places, NO_PLACE), NO_PLACE),
            "kv_lens": padded(positions + 1, 0, np.int32),
            "table_rows": padded(row, 0, np.int32),
            "cu_queries": np.arange(shape.num_rows + 1, dtype=np.int32),
            "tiles": np.empty((0, 2), np.int32),
            "part_ptr": padded(pointers, int(pointers[-1]), np.int32),
            "parts": parts,
        }

    def _issue(self, tensors: Tensors, shape: _Shape, most_lens: Sequence[HostLens] = ()) -> None:
        """Compute the drafts. `most_lens` has bounds of the rows' lengths for each draft, if the host has them."""
        t, work = tensors, AttentionWork(tensors["tiles"], tensors["parts"], tensors["part_ptr"])
        table, ids, positions, kv_lens, places = self._batch.table, *(t[name] for name in _CORRECTED)
        keys = (
            kv_lens,
            places if self._dealt is None else None,
            t["table_rows"],
            table.device,
            table.kernel_block_size,
        )
        at = t["rejected_at"]
        optimistic = OptimisticColumns(self._records.num_rejected, at, positions, *keys, at, t["pending"])
        self._ops.catch_up(IdColumns(ids, t["rows"], self._batch.last_sampled), optimistic)
        if self._dealt is not None:
            places = table.device_key_places(t["lines"], positions)
        hidden = self._records.newest_of(self._layer, CONV, t["slots"], t["line"], t["pending"])
        for i in range(shape.num_drafts):
            index = AttentionIndex(
                shape.num_rows,
                t["cu_queries"],
                kv_lens[i],
                table.device,
                t["table_rows"],
                places[i],
                work=work,
                first_key=FIRST_KEY,
            )
            if self._dealt is not None:
                index = self._dealt.complete(index, table, most_lens[i] if most_lens else ((), ()))
            rope = positions[i] + t["rope_shift"] if "rope_shift" in t else positions[i]
            ctx = ForwardContext(rope, shape.num_rows, index, {}, {}, self._records.layers)
            output, hidden = self._model.draft(ids, hidden, ctx)
            ids = self._model.head.guess(output)
            self.drafted[:, i].index_copy_(0, t["rows"], ids)
