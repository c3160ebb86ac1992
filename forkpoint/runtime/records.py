"""Records of tokens whose states are not written yet.

A step with drafts records its tokens until it is known which drafts were accepted. Recurrent states that are written
every few tokens only record the tokens between two writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.cache.layer_spec import Recording, TensorSpec
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.models.context import LayerCache
from forkpoint.ops.metadata import RecordIndex, VerifyIndex, running_total
from forkpoint.ops.table import OpTable
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.buffers import DTYPES, ArenaBuffer
from forkpoint.sched.plan import NO_ROW, NO_SLOT, IntArray, StateFlush, StepPlan, StepRows

# Arrays by name, each with its size in a padded step and the value of the padding.
Columns: TypeAlias = dict[str, tuple[npt.NDArray[Any], int, int]]


class TokenRecords:
    """The records of all rows. The plan says how far the state in each row's slot lags behind the row (StepRows).

    States that are folded in the next step have two lines of records for each row: a step reads one and writes the
    other. Spaced states and `single` records have one line for each row.

    `layers` are the arena's, each with its records `[lines, tokens, *shape]` under the names that the specs give them.
    `num_rejected[row]`, int64 on the device, is the number of rejected drafts of the row's last step with drafts. The
    entry after all rows is 0.
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
        """A step has at most `most_tokens` tokens of a row.

        `constants` of a tensor, by layer and name, are appended to the records passed to its `fold` operator.
        """
        self._ops, self._platform = ops, platform
        assert BLOCK_SIZE % interval == 0, "a checkpoint must be whole"
        self.interval, self._states = interval, arena.states
        layers = [dict(cache) for cache in arena.layers]
        self._pending_states = list[tuple[str, Tensor, list[Tensor]]]()
        self._spaced_states = list[tuple[str, Tensor, list[Tensor]]]()
        for number, tensor, pool in arena.states:
            own = {
                record.name: torch.zeros(
                    (lines * num_rows, length, *record.shape), dtype=DTYPES[record.dtype], device=platform.device
                )
                for record, lines, length in _records(tensor, most_tokens, interval)
            }
            layers[number] |= own
            recording = _recording(tensor, most_tokens, interval)
            if recording is None:
                continue
            if recording is tensor.spaced:
                self._spaced_states.append((recording.fold, pool, list(own.values())))
            else:
                operands = [*own.values(), *constants.get((number, tensor.name), ())]
                self._pending_states.append((recording.fold, pool, operands))
        self.layers: tuple[LayerCache, ...] = tuple(layers)
        self._line = 2 * np.arange(num_rows, dtype=np.int32)  # the line that the row's next step reads
        self.num_rejected = torch.zeros(num_rows + 1, dtype=torch.int64, device=platform.device)

    def columns(self, plan: StepPlan, size: int, verifies: bool) -> Columns:
        """Return the columns of the step's decode rows, of which a padded step has `size`.

        The columns of RecordIndex are there if some states are written only every few tokens, the columns of
        VerifyIndex if the step `verifies` drafts. Both share src, dst and cu_tokens.
        """
        rows, decodes, found = plan.rows, plan.num_decodes, Columns()
        # A copy, because catch_up takes rejected drafts off the tensor, which may share the array's memory.
        row, pending = rows.row[:decodes], rows.pending[:decodes].copy()
        if self._spaced_states:
            written = rows.written[:decodes]
            held = rows.start[:decodes] - written
            found |= {
                **self._marks(plan, held, "record", size),
                "record_line": (row, size, NO_ROW),
                "record_written": (written, size, 0),
                "record_held": (held, size, 0),
            }
        if verifies:
            line = self._line[row]
            found |= {
                **self._marks(plan, pending, "verify", size),
                "verify_pending": (pending, size, 0),
                "verify_read": (line, size, 0),
                "verify_write": (line ^ 1, size, 0),
                "verify_line": (row, size, 0),
            }
        if found:
            ends = running_total(rows.num_tokens[:decodes])
            found |= {
                "row_src": (rows.read_slot[:decodes], size, NO_SLOT),
                "row_dst": (rows.write_slot[:decodes], size, NO_SLOT),
                "row_cu_tokens": (ends, size + 1, int(ends[-1])),
            }
        return found

    def _marks(self, plan: StepPlan, num_pending: IntArray, kind: str, size: int) -> Columns:
        """Return each row's mark and the slot for the state there, as columns whose names begin with `kind`.

        A mark counts from the oldest of the row's `num_pending` pending tokens. Rows without a mark have 0 and NO_SLOT.
        """
        rows, decodes = plan.rows, plan.num_decodes
        if not decodes:
            return {f"{kind}_mark": (num_pending, size, 0), f"{kind}_mark_dst": (num_pending, size, NO_SLOT)}
        read, write, start = (column[:decodes] for column in (rows.read_slot, rows.write_slot, rows.start))
        # A row that goes on in another slot leaves a checkpoint in the old slot, which has to be complete.
        turns = (num_pending > 0) & (read != write) & (start % self.interval == 0)
        mark, mark_slot = np.where(turns, num_pending, 0), np.where(turns, read, NO_SLOT)
        saves = np.diff(rows.save_ptr[: decodes + 1])
        assert saves.max(initial=0) <= 1, "the tokens of a step pass one boundary at most"
        saving, num_saves = np.flatnonzero(saves), int(saves.sum())
        mark[saving] = rows.save_positions[:num_saves] - (start - num_pending)[saving]
        mark_slot[saving] = rows.save_slots[:num_saves]
        return {f"{kind}_mark": (mark, size, 0), f"{kind}_mark_dst": (mark_slot, size, NO_SLOT)}

    def newest_of(self, layer: int, name: str, slots: Tensor, lines: Tensor, pending: Tensor) -> Tensor:
        """Return each row's newest entry `[N, ...]` of the convolution window `name` of a layer.

        It is the record of the row's newest pending token, or without one the last entry in the row's slot. `slots`,
        `lines` and `pending` are on the device, `[N]` int64.
        """
        window, pool = next((spec, pool) for number, spec, pool in self._states if (number, spec.name) == (layer, name))
        assert window.drafts is not None, "a window whose drafts can be verified"
        records = self.layers[layer][window.drafts.records[0].name]
        return self._ops.newest(pool[:, -1], records, slots, lines, pending)

    def rejected_at(self, rows: StepRows) -> IntArray:
        """Return each row's index in `num_rejected`: its own if it is optimistic, else that of the 0."""
        return np.where(rows.optimistic, rows.row, np.int32(len(self._line)))

    def issued(self, plan: StepPlan) -> None:
        """Swap the decode rows' lines, so that the next step reads those written now. Call it after `columns`."""
        self._line[plan.rows.row[: plan.num_decodes]] ^= 1

    def flush(self, flushes: Sequence[StateFlush]) -> None:
        """Fold the records of rows that leave into the states in their slots, on the device."""
        if not flushes:
            return
        pending = [each for each in flushes if each.pending]
        if pending:
            self._fold(pending)
        columns = [(each.row, each.slot, each.written, each.num_tokens - each.written) for each in flushes]
        row, slot, written, held = np.ascontiguousarray(np.asarray(columns, np.int32).T)
        none, tokens = np.zeros_like(row), np.zeros(len(row) + 1, np.int32)
        index = RecordIndex(self.interval, *self._upload(slot, slot, tokens, row, written, held, none, none))
        for name, pool, records in self._spaced_states:
            getattr(self._ops, name)(pool, index, records)

    def _fold(self, flushes: Sequence[StateFlush]) -> None:
        columns = [(each.row, each.slot, each.pending) for each in flushes]
        row, slot, pending = np.ascontiguousarray(np.asarray(columns, np.int32).T)
        line, none, tokens = self._line[row], np.zeros_like(row), np.zeros(len(row) + 1, np.int32)
        index = VerifyIndex(*self._upload(slot, slot, tokens, pending, none, none, line, line, row))
        for name, pool, records in self._pending_states:
            getattr(self._ops, name)(pool, index, records)

    def prepare(self) -> None:
        """Let the device compile the kernels for rows that leave, before there is one."""
        flush = StateFlush(row=0, slot=NO_SLOT, num_tokens=0, written=0, pending=0)
        self._fold([flush])
        self.flush([flush])

    def _upload(self, *columns: IntArray) -> list[Tensor]:
        return [self._platform.upload(column) for column in columns]


def records_bytes(layout: CacheLayout, num_rows: int, most_tokens: int, interval: int) -> int:
    """Return the bytes of the records of `num_rows` rows, with at most `most_tokens` tokens of a row in a step."""
    tensors = (tensor for spec in layout.states for tensor in spec.tensors)
    records = (each for tensor in tensors for each in _records(tensor, most_tokens, interval))
    return num_rows * sum(lines * length * record.num_bytes() for record, lines, length in records)


def _records(tensor: TensorSpec, most_tokens: int, interval: int) -> Iterator[tuple[TensorSpec, int, int]]:
    """Yield the records of a tensor: (spec, lines of each row, tokens of each line).

    A step must not overwrite records that it reads, unless they are `single`.
    """
    recording = _recording(tensor, most_tokens, interval)
    if recording is None:
        return
    for record in recording.records:
        copies = 2 - record.single
        if recording is tensor.spaced:
            yield record, 1, interval - 1 + copies * most_tokens
        else:
            yield record, copies, most_tokens


def _recording(tensor: TensorSpec, most_tokens: int, interval: int) -> Recording | None:
    """Return how decode rows record their tokens of a tensor, as `LayerState.decode` chooses; None: they do not."""
    if interval > 1 and tensor.spaced is not None:
        return tensor.spaced
    return tensor.drafts if most_tokens > 1 else None
