"""What rows with drafts leave for their next step: the tokens accepted, which that step folds into the state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout, LayerSpec, StateSpec, TensorSpec
from forkpoint.models.context import LayerCache
from forkpoint.ops.metadata import VerifyIndex, running_total
from forkpoint.ops.table import OpTable
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.buffers import DTYPES, ArenaBuffer
from forkpoint.sched.plan import NO_SLOT, IntArray, Move, MoveKind, StepPlan, StepRows


class DraftRecords:
    """The lines of all rows, and how many tokens of each are still to be folded into the row's state.

    A slot is behind its row by these until the row's next step; the state of a row that leaves the batch at a block
    boundary, where it may have become a checkpoint, is folded first. A row has two lines: a step writes one and reads
    the other. `layers` are the arena's, each with its records `[2 * num_rows, most_tokens, *shape]` under the names
    that the specs give them. `missed[row]`, int64 on the device, are the drafts that did not count of the row's last
    step with some; behind all rows there is a 0. Until a step's result is known the host supposes that all count.
    """

    def __init__(self, arena: ArenaBuffer, ops: OpTable, num_rows: int, most_tokens: int, platform: Platform) -> None:
        self._ops, self._platform, self._grid = ops, platform, arena.layout.checkpoint_grid
        self._specs = arena.layout.layers
        specs = [_tensors(layer) for layer in self._specs]
        self.layers: tuple[LayerCache, ...] = tuple(
            {
                **cache,
                **{line.name: self._lines(2 * num_rows, most_tokens, line) for spec in own for line in spec.records},
            }
            for cache, own in zip(arena.layers, specs, strict=True)
        )
        self._states = [
            (spec.fold, cache[spec.name], [cache[record.name] for record in spec.records])
            for cache, own in zip(self.layers, specs, strict=True)
            for spec in own
        ]
        self._pending = np.zeros(num_rows, np.int32)
        self._line = 2 * np.arange(num_rows, dtype=np.int32)  # that the row's next step reads
        self._end = np.zeros(num_rows, np.int32)  # tokens that the state has once they are folded
        self._slot = np.full(num_rows, NO_SLOT, np.int32)
        self._step = np.zeros(num_rows, np.int64)  # that issued the row last
        self.missed = torch.zeros(num_rows + 1, dtype=torch.int64, device=platform.device)

    def _lines(self, num_lines: int, most_tokens: int, record: TensorSpec) -> Tensor:
        shape = (num_lines, most_tokens, *record.shape)
        return torch.zeros(shape, dtype=DTYPES[record.dtype], device=self._platform.device)

    def concern(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has drafts, or tokens to be folded."""
        rows = plan.rows
        return bool(rows.num_drafts.any()) or bool(self._pending[rows.row[: plan.num_decodes]].any())

    def columns(self, plan: StepPlan) -> tuple[IntArray, ...]:
        """What the decode rows of a step fold, compute and leave, in the order of VerifyIndex."""
        rows, count = plan.rows, plan.num_decodes
        row, read, write = rows.row[:count], rows.read_slot[:count], rows.write_slot[:count]
        pending, line = self._pending[row], self._line[row]
        # A row that turns to another slot leaves a checkpoint behind, which has to be whole.
        turns = (pending > 0) & (read != write)
        mark, mark_slot = np.where(turns, pending, 0), np.where(turns, read, NO_SLOT)
        saves = np.diff(rows.save_ptr[: count + 1])
        assert saves.max(initial=0) <= 1, "the tokens of a step pass one boundary at most"
        at, num_saves = np.flatnonzero(saves), int(saves.sum())
        mark[at] = rows.save_positions[:num_saves] - (rows.start[:count] - pending)[at]
        mark_slot[at] = rows.save_slots[:num_saves]
        mark[mark > pending] = 0  # in reach of the last step, which did not come so far
        offsets = running_total(rows.num_tokens[:count])
        return read, write, offsets, pending, mark, mark_slot, line, line ^ 1

    def newest(self, layer: int, name: str, rows: IntArray, slots: IntArray) -> Tensor:
        """Of the window `name` of a layer the newest entry for each row `[N, ...]`: its newest pending token's, or else
        that of the row's slot."""
        columns = (slots, *self.newest_lines(rows))
        return self.newest_of(layer, name, *(self._platform.upload(column).long() for column in columns))

    def newest_lines(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """The lines that the rows' next step reads, and how many tokens of each are pending."""
        return self._line[rows], self._pending[rows]

    def newest_of(self, layer: int, name: str, slots: Tensor, lines: Tensor, pending: Tensor) -> Tensor:
        """`newest` from those on the device, `[N]` int64."""
        own = next(spec for spec in _tensors(self._specs[layer]) if spec.name == name)
        kept, records = self.layers[layer][name], self.layers[layer][own.records[0].name]
        of_line = records[lines, (pending - 1).clamp(min=0)]
        return torch.where((pending > 0).unsqueeze(1), of_line, kept[slots, -1])

    def late(self, rows: StepRows) -> IntArray:
        """Each row's place in `missed`: its own if it was planned ahead, else that of the 0."""
        return np.where(rows.ahead, rows.row, np.int32(len(self._line)))

    def behind(self, rows: StepRows) -> IntArray:
        """How many tokens each row may be behind where it was planned to start."""
        return np.where(rows.ahead, self._pending[rows.row] - 1, 0)

    def caught_up(self, rows: StepRows) -> StepRows:
        """With exact starts, where the device's memory is the host's."""
        missed = self.missed.numpy()[self.late(rows)].astype(np.int32)
        return replace(rows, start=rows.start - missed, ahead=np.zeros_like(rows.ahead))

    def issued(self, plan: StepPlan) -> None:
        """The step is on its way. What rows without drafts compute is in their slots."""
        rows, count = plan.rows, plan.num_decodes
        row, drafts = rows.row[:count], rows.num_drafts[:count]
        self._pending[row] = np.where(drafts, 1 + drafts, 0)
        self._end[row] = (rows.start + rows.num_tokens)[:count]
        self._slot[row], self._step[row] = rows.write_slot[:count], plan.step
        self._line[row] ^= 1

    def confirm(self, plan: StepPlan, counts: IntArray) -> None:
        """It is known how many tokens of each row that the step sampled count."""
        row, missed = plan.sampled_rows, 1 + plan.rows.num_drafts[plan.rows.samples] - counts
        self._end[row] -= missed
        self._pending[row] -= np.where(self._step[row] == plan.step, missed, 0)

    def leave(self, removed: Iterable[int], moves: Iterable[Move]) -> None:
        """Rows leave the batch, then slots move. The state of a row at a boundary may have become a checkpoint."""
        gone = np.asarray(list(removed), np.int64)
        whole = gone[(self._pending[gone] > 0) & (self._end[gone] % self._grid == 0)]
        if len(whole):
            self._fold(whole)
        self._pending[gone] = 0
        for move in moves:
            if move.kind is MoveKind.SLOT:
                self._slot[self._slot == move.src] = move.dst

    def _fold(self, rows: npt.NDArray[np.int64]) -> None:
        slot, line, pending, none = self._slot[rows], self._line[rows], self._pending[rows], np.zeros_like(rows)
        columns = (slot, slot, np.zeros(len(rows) + 1), pending, none, none, line, line)
        index = VerifyIndex(*(self._platform.upload(column.astype(np.int32)) for column in columns))
        for name, pool, records in self._states:
            assert name is not None, "made for states that can be folded"
            getattr(self._ops, name)(pool, index, records)


def records_bytes(layout: CacheLayout, num_rows: int, most_tokens: int) -> int:
    """What the lines of so many rows take."""
    each = sum(line.num_bytes() for layer in layout.layers for spec in _tensors(layer) for line in spec.records)
    return 2 * num_rows * most_tokens * each


def _tensors(layer: LayerSpec) -> list[TensorSpec]:
    return [tensor for spec in layer if isinstance(spec, StateSpec) for tensor in spec.tensors]
