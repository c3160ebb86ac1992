"""Drafts by the model's MTP layer that stay on the device: all of a step in one graph, none waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from forkpoint.models.context import ForwardContext
from forkpoint.models.decoder import Model
from forkpoint.models.mtp import FIRST_KEY
from forkpoint.ops.metadata import AttentionIndex, AttentionWork, KeySplits
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.batch import Batch
from forkpoint.runtime.records import TokenRecords
from forkpoint.runtime.staging import InputRegion, layout_of, upload_all
from forkpoint.runtime.step_inputs import Arrays, StepShape, Tensors, draft_places, rows_to_draft
from forkpoint.sched.plan import NO_ROW, NO_SLOT, IntArray, StepPlan


@dataclass(frozen=True, slots=True)
class _Shape:
    """So many drafts for each of so many rows."""

    num_rows: int
    num_drafts: int


@dataclass(frozen=True, slots=True)
class _Graph:
    offsets: tuple[int, ...]
    replay: Callable[[], None]


class DraftGraphs:
    """`drafted[row, i]` is the row's i-th draft of the step issued last, as far as its plan left it to the runner.

    The layer's keys of the drafts go where the step's own will be written. A row that wants fewer drafts than others
    stores nothing for the rest. Without `record` the same work is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Model,
        batch: Batch,
        records: TokenRecords,
        platform: Platform,
        most: int,
        steps: Sequence[StepShape],
    ) -> None:
        """For at most `most` drafts of a row; `steps` are those that verify them."""
        self._model, self._batch, self._records, self._platform = model, batch, records, platform
        self._layer, self._splits = len(model.config.layers), KeySplits(batch.table.kernel_block_size)
        num_rows, self.most = batch.table.num_rows, most
        self.drafted = torch.zeros((num_rows + 1, most), dtype=torch.int64, device=platform.device)  # last: padding's
        steps = [step for step in steps if step.num_verified and not step.num_segments]
        rows = {step.num_verified for step in steps}
        drafts = {step.num_decodes // step.num_verified - 1 for step in steps}
        self._shapes = [_Shape(count, each) for count in sorted(rows)[::-1] for each in sorted(drafts)[::-1]]
        self._graphs: dict[_Shape, _Graph] = {}
        self._region: InputRegion | None = None

    def record(self) -> None:
        """A graph for each number of rows and of drafts that the steps have."""
        layouts = [layout_of(self._padding(shape)) for shape in self._shapes]
        sizes = [fields[-1].offset + fields[-1].num_bytes for fields in layouts]
        self._region = InputRegion(self._platform, max(sizes, default=0))
        for shape, fields in zip(self._shapes, layouts, strict=True):
            offsets = tuple(field.offset for field in fields)
            self._region.fill(self._padding(shape), offsets)
            tensors = self._region.tensors(fields)

            def run(tensors: Tensors = tensors, shape: _Shape = shape) -> None:
                self._issue(tensors, shape)

            run()  # compiles what the shape needs
            self._graphs[shape] = _Graph(offsets, self._platform.record_graph(run))

    def filled(self, plan: StepPlan, must_know: bool) -> StepPlan:
        """Make the drafts that the plan leaves to the runner. Waits for them, and puts them in the plan, only if they
        must be known on the host."""
        rows = plan.rows
        chosen, first = rows_to_draft(rows)
        if not len(chosen):
            return plan
        columns = (rows.row, rows.start, rows.num_drafts, rows.tokens[first], rows.read_slot, self._records.late(rows))
        self._make(*(column[chosen] for column in columns))
        return self.told(plan) if must_know else plan

    def told(self, plan: StepPlan) -> StepPlan:
        """The plan with the ids of the drafts that it left to the runner; waits for them."""
        tokens, (at, row, number) = plan.rows.tokens.copy(), draft_places(plan)
        tokens[at] = self.drafted.cpu().numpy()[row, number]
        return replace(plan, rows=replace(plan.rows, tokens=tokens))

    def _make(
        self,
        row: IntArray,
        start: IntArray,
        counts: IntArray,
        known: IntArray,
        slot: IntArray,
        late: IntArray,
    ) -> None:
        exact = _Shape(len(row), int(counts.max()))
        fitting = [s for s in self._graphs if s.num_rows >= exact.num_rows and s.num_drafts >= exact.num_drafts]
        shape = min(fitting, key=lambda s: s.num_rows * s.num_drafts) if fitting else exact
        arrays = self._arrays(shape, row, start, counts, known, slot, late)
        if fitting and self._region is not None:
            graph = self._graphs[shape]
            self._region.fill(arrays, graph.offsets)
            graph.replay()
        else:
            self._issue(upload_all(self._platform, arrays), shape)

    def _padding(self, shape: _Shape) -> Arrays:
        none = np.empty(0, np.int32)
        arrays = self._arrays(shape, none, none, none, none, none, none)
        most = self._splits.most(shape.num_rows, self._batch.table.max_entries_per_row)
        arrays["parts"] = np.full((most, 3), NO_ROW, np.int32)
        return arrays

    def _arrays(
        self,
        shape: _Shape,
        row: IntArray,
        start: IntArray,
        counts: IntArray,
        known: IntArray,
        slot: IntArray,
        late: IntArray,
    ) -> Arrays:
        table, most, pad = self._batch.table, shape.num_drafts, shape.num_rows - len(row)
        number = np.arange(most, dtype=np.int32)[:, None]
        positions = (start + np.minimum(number, counts - 1)).astype(np.int64)  # [most, rows]
        places = table.kv_slots(np.tile(row, most), positions.ravel()).reshape(positions.shape)
        line, pending = self._records.newest_lines(row)
        # One list of parts for all drafts: those of the last may be empty for the first ones.
        parts, pointers = self._splits.table(positions[-1] + 1)

        def padded(values: np.ndarray, fill: int, dtype: type = np.int64) -> np.ndarray:
            out = np.full((*values.shape[:-1], values.shape[-1] + pad), fill, dtype)
            out[..., : values.shape[-1]] = values
            return out

        return {
            "rows": padded(row, table.num_rows),
            "known": padded(known, 0),
            "slots": padded(slot, 0),
            "line": padded(line, 0),
            "pending": padded(pending, 0),
            "late": padded(late, table.num_rows),
            "positions": padded(np.maximum(positions - 1, 0), 0),
            "slot_mapping": padded(np.where(number < counts, places, NO_SLOT), NO_SLOT),
            "kv_lens": padded(positions + 1, 0, np.int32),
            "table_rows": padded(row, 0, np.int32),
            "cu_queries": np.arange(shape.num_rows + 1, dtype=np.int32),
            "tiles": np.empty((0, 2), np.int32),
            "part_ptr": padded(pointers, int(pointers[-1]), np.int32),
            "parts": parts,  # the last field: a graph's region for it is larger than what is filled
        }

    def _issue(self, tensors: Tensors, shape: _Shape) -> None:
        t, work = tensors, AttentionWork(tensors["tiles"], tensors["parts"], tensors["part_ptr"])
        missed, table = self._records.missed[t["late"]], self._batch.table
        ids = torch.where(t["known"] < 0, self._batch.last_sampled[t["rows"]], t["known"])
        hidden = self._records.newest_of(self._layer, "conv", t["slots"], t["line"], t["pending"] - missed)
        positions, kv_lens = t["positions"] - missed, t["kv_lens"] - missed.int()
        slots = table.kv_slots_there(t["table_rows"].long(), positions + 1, t["slot_mapping"])
        for i in range(shape.num_drafts):
            index = AttentionIndex(
                shape.num_rows,
                t["cu_queries"],
                kv_lens[i],
                table.device,
                t["table_rows"],
                slots[i],
                work=work,
                first_key=FIRST_KEY,
            )
            ctx = ForwardContext(positions[i], shape.num_rows, index, {}, {}, self._records.layers)
            hidden = self._model.draft(ids, hidden, ctx)
            ids = self._model.head.guess(hidden)
            self.drafted[:, i].index_copy_(0, t["rows"], ids)
