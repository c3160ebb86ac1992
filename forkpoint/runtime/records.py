"""What tokens leave behind for the next steps of their rows: until it is known which count, and between two writes of
their recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout, TensorSpec
from forkpoint.config import BLOCK_SIZE
from forkpoint.models.context import LayerCache
from forkpoint.ops.metadata import RecordIndex, VerifyIndex, running_total
from forkpoint.ops.table import OpTable
from forkpoint.platforms.packing import Arrays
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.buffers import DTYPES, ArenaBuffer
from forkpoint.sched.plan import NO_ROW, NO_SLOT, IntArray, Move, MoveKind, StepPlan, StepRows

Pad = Callable[[IntArray, int], IntArray]  # a column of a step's decode rows, and what rows of padding have in it
NOWHERE = -1  # where the last step of a row started that it did not decode


class TokenRecords:
    """The lines of all rows, and how many tokens of each are still to be folded into the row's state.

    With drafts a slot is behind its row by the tokens of a step until the row's next one; recurrences that can be
    written every `interval` tokens are behind by those since the last multiple of it. Positions alone decide, so a
    request's bits do not depend on what else ran; the grid of checkpoints is a multiple of it. The state of a row that
    leaves the batch at a block boundary, where it may have become a checkpoint, is folded first. `most_tokens` of a row
    are in a step; of what is not `single` a row has two lines: a step writes one and reads the other. `layers` are the
    arena's, each with its records `[lines, tokens, *shape]` under the names that the specs give them. `missed[row]`,
    int64 on the device, are the drafts that did not count of the row's last step with some; behind all rows there is a
    0. Until a step's result is known the host supposes that all count. What `constants` has of a layer's tensor stands
    behind the records that its `fold` is given.
    """

    def __init__(
        self,
        arena: ArenaBuffer,
        ops: OpTable,
        num_rows: int,
        most_tokens: int,
        interval: int,
        platform: Platform,
        constants: Mapping[tuple[int, str], Sequence[Tensor]],
    ) -> None:
        self._ops, self._platform = ops, platform
        assert BLOCK_SIZE % interval == 0, "a checkpoint must be whole"
        self.interval, self._states = interval, arena.states
        self.drafts = most_tokens > 1  # whether rows may have some
        layers = [dict(cache) for cache in arena.layers]
        self._pending_states = list[tuple[str | None, Tensor, list[Tensor]]]()
        self._spaced_states = list[tuple[Tensor, list[Tensor]]]()
        for number, tensor, pool in arena.states:
            own = {
                record.name: torch.zeros(
                    (lines * num_rows, length, *record.shape), dtype=DTYPES[record.dtype], device=platform.device
                )
                for record, lines, length in _records(tensor, most_tokens, interval)
            }
            layers[number] |= own
            if own and interval > 1 and tensor.spaced:
                self._spaced_states.append((pool, list(own.values())))
            elif own:
                behind = [*own.values(), *constants.get((number, tensor.name), ())]
                self._pending_states.append((tensor.fold, pool, behind))
        self.layers: tuple[LayerCache, ...] = tuple(layers)
        self._pending = np.zeros(num_rows, np.int32)
        self._line = 2 * np.arange(num_rows, dtype=np.int32)  # that the row's next step reads
        self._start = np.full(num_rows, NOWHERE, np.int32)  # of the row's last step
        self._whole = np.zeros(num_rows, np.int32)  # tokens of the state that it read
        self._end = np.zeros(num_rows, np.int32)  # tokens that the state has once they are folded
        self._slot = np.full(num_rows, NO_SLOT, np.int32)
        self._step = np.zeros(num_rows, np.int64)  # that issued the row last
        self.missed = torch.zeros(num_rows + 1, dtype=torch.int64, device=platform.device)

    def concern(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has drafts, or tokens to be folded."""
        rows = plan.rows
        return bool(rows.num_drafts.any()) or bool(self._pending[rows.row[: plan.num_decodes]].any())

    def arrays(self, plan: StepPlan, pad: Pad, verifies: bool) -> Arrays:
        """What the decode rows of a step, padded by `pad`, find, compute and leave: the fields of RecordIndex, unless
        every state is written, and those of VerifyIndex, if the step `verifies`; src, dst and cu_tokens are both's."""
        rows, decodes, found = plan.rows, plan.num_decodes, Arrays()
        row, start = rows.row[:decodes], rows.start[:decodes]
        if self._spaced_states:
            written = self._written(row, start)
            found |= {
                **self._marks(plan, start - written, "record", pad),
                "record_line": pad(row, NO_ROW),
                "record_written": pad(written, 0),
                "record_held": pad(start - written, 0),
            }
        if verifies:
            pending, line = self._pending[row], self._line[row]
            found |= {
                **self._marks(plan, pending, "verify", pad),
                "verify_pending": pad(pending, 0),
                "verify_read": pad(line, 0),
                "verify_write": pad(line ^ 1, 0),
                "verify_line": pad(row, 0),
            }
        if found:
            found |= {
                "row_src": pad(rows.read_slot[:decodes], NO_SLOT),
                "row_dst": pad(rows.write_slot[:decodes], NO_SLOT),
                "row_cu_tokens": running_total(pad(rows.num_tokens[:decodes], 0)),
            }
        return found

    def _marks(self, plan: StepPlan, behind: IntArray, kind: str, pad: Pad) -> Arrays:
        """Rows are `behind` by so many tokens: after how many of those a state goes elsewhere too, and where."""
        rows, decodes = plan.rows, plan.num_decodes
        read, write, start = (column[:decodes] for column in (rows.read_slot, rows.write_slot, rows.start))
        # A row that turns to another slot leaves a checkpoint behind, which has to be whole.
        turns = (behind > 0) & (read != write) & (start % self.interval == 0)
        mark, mark_slot = np.where(turns, behind, 0), np.where(turns, read, NO_SLOT)
        saves = np.diff(rows.save_ptr[: decodes + 1])
        assert saves.max(initial=0) <= 1, "the tokens of a step pass one boundary at most"
        at, num_saves = np.flatnonzero(saves), int(saves.sum())
        mark[at] = rows.save_positions[:num_saves] - (start - behind)[at]
        mark_slot[at] = rows.save_slots[:num_saves]
        return {f"{kind}_mark": pad(mark, 0), f"{kind}_mark_dst": pad(mark_slot, NO_SLOT)}

    def _written(self, row: IntArray, start: IntArray) -> IntArray:
        """Tokens of the states in the rows' slots; a row that was not decoded before has a whole one."""
        before = self._start[row]
        return np.where(before < 0, start, np.maximum(self._whole[row], before // self.interval * self.interval))

    def newest_lines(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """The lines of windows' records that the rows' next step reads, and how many tokens of each are pending."""
        return rows, self._pending[rows]

    def newest_of(self, layer: int, name: str, slots: Tensor, lines: Tensor, pending: Tensor) -> Tensor:
        """Of the window `name` of a layer the newest entry for each row `[N, ...]`: its newest pending token's, or else
        that of the row's slot; from slots, lines and pending tokens on the device, `[N]` int64."""
        window, pool = next((spec, pool) for number, spec, pool in self._states if (number, spec.name) == (layer, name))
        return self._ops.newest(pool[:, -1], self.layers[layer][window.records[0].name], slots, lines, pending)

    def late(self, rows: StepRows) -> IntArray:
        """Each row's place in `missed`: its own if it is optimistic, else that of the 0."""
        return np.where(rows.optimistic, rows.row, np.int32(len(self._line)))

    def behind(self, rows: StepRows) -> IntArray:
        """How many tokens each row may be behind where it was planned to start."""
        return np.where(rows.optimistic, self._pending[rows.row] - 1, 0)

    def issued(self, plan: StepPlan) -> None:
        """The step is on its way. What rows without drafts compute is in their slots, or recorded."""
        rows, count = plan.rows, plan.num_decodes
        row, start, drafts = rows.row[:count], rows.start[:count], rows.num_drafts[:count]
        self._whole[row], self._start[row] = self._written(row, start), start
        self._pending[row] = np.where(drafts, 1 + drafts, 0)
        self._end[row] = (rows.start + rows.num_tokens)[:count]
        self._slot[row], self._step[row] = rows.write_slot[:count], plan.step
        self._line[row] ^= 1

    def apply_counts(self, plan: StepPlan, counts: IntArray) -> None:
        """It is known how many tokens of each row that the step sampled count."""
        row, missed = plan.sampled_rows, 1 + plan.rows.num_drafts[plan.rows.samples] - counts
        is_last = self._step[row] == plan.step
        self._end[row] -= missed
        self._pending[row] -= np.where(is_last, missed, 0)
        self._start[row] -= np.where(is_last, 0, missed)

    def leave(self, removed: Iterable[int], moves: Iterable[Move]) -> None:
        """Rows leave the batch, then slots move. The state of a row at a boundary may have become a checkpoint."""
        gone = np.asarray(list(removed), np.int64)
        gone_whole = gone[(self._start[gone] >= 0) & (self._end[gone] % BLOCK_SIZE == 0)]
        self._fold(gone_whole[self._pending[gone_whole] > 0])
        self._flush(gone_whole)
        self._pending[gone], self._start[gone] = 0, NOWHERE
        for move in moves:
            if move.kind is MoveKind.SLOT:
                self._slot[self._slot == move.src] = move.dst

    def prepare(self) -> None:
        """Have the device compile what a row needs that leaves, before there is one."""
        row = np.zeros(1, np.int64)
        self._fold(row)
        self._flush(row)

    def _fold(self, rows: npt.NDArray[np.int64]) -> None:
        if not len(rows):
            return
        slot, line, pending, none = self._slot[rows], self._line[rows], self._pending[rows], np.zeros_like(rows)
        tokens = np.zeros(len(rows) + 1)
        index = VerifyIndex(*self._upload(slot, slot, tokens, pending, none, none, line, line, rows))
        for name, pool, records in self._pending_states:
            assert name is not None, "made for states that can be folded"
            getattr(self._ops, name)(pool, index, records)

    def _flush(self, rows: npt.NDArray[np.int64]) -> None:
        if not len(rows):
            return
        slot, end, none = self._slot[rows], self._end[rows], np.zeros_like(rows)
        written = self._written(rows.astype(np.int32), end)
        tokens, held = np.zeros(len(rows) + 1), end - written
        index = RecordIndex(self.interval, *self._upload(slot, slot, tokens, rows, written, held, none, none))
        for pool, records in self._spaced_states:
            self._ops.recurrence_flush(pool, index, records)

    def _upload(self, *columns: npt.NDArray[Any]) -> list[Tensor]:
        return [self._platform.upload(column.astype(np.int32)) for column in columns]


def records_bytes(layout: CacheLayout, num_rows: int, most_tokens: int, interval: int) -> int:
    """What the lines of so many rows take."""
    tensors = (tensor for spec in layout.states for tensor in spec.tensors)
    records = (each for tensor in tensors for each in _records(tensor, most_tokens, interval))
    return num_rows * sum(lines * length * record.num_bytes() for record, lines, length in records)


def _records(tensor: TensorSpec, most_tokens: int, interval: int) -> Iterator[tuple[TensorSpec, int, int]]:
    """(a record of the tensor's tokens, lines of each row, tokens of each line)."""
    if interval > 1 and tensor.spaced:
        for i, record in enumerate(tensor.spaced):
            # Updates that a step folds and writes over are read and written by the same program; the others are read by
            # many.
            yield record, 1, interval - 1 + (1 + (i > 0)) * most_tokens
    elif most_tokens > 1:
        for record in tensor.records:
            yield record, 1 if record.single else 2, most_tokens
