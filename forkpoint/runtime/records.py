"""Records of tokens whose states are not written yet.

A step with drafts records its tokens until it is known which drafts were accepted. Recurrent states that are written
every few tokens only record the tokens between two writes.
"""

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
from forkpoint.sched.plan import NO_ROW, NO_SLOT, IntArray, Move, MoveKind, MoveRoute, StepPlan, StepRows

Pad = Callable[[IntArray, int], IntArray]  # pads a column of decode rows with a value
NOWHERE = -1  # instead of the start of a row's last step: the row was not decoded yet


class TokenRecords:
    """The records of all rows, and how far the state in each row's slot lags behind the row.

    A slot lags its row. A *spaced* state, written at multiples of `interval`, lags by the tokens since the last
    multiple. Other states lag by the last step's tokens if rows have drafts, and not at all otherwise. Only positions
    decide, so a request's bits do not depend on other rows. Checkpoints lie on multiples of the interval. A row that
    leaves the batch at a block boundary, where its state may have become a checkpoint, is brought up to date first.

    A state that is folded in the next step has two lines of records for each row: a step reads one and writes the
    other. Spaced states and `single` records have one line for each row.

    `layers` are the arena's, each with its records `[lines, tokens, *shape]` under the names that the specs give them.
    `missed[row]`, int64 on the device, is the number of rejected drafts of the row's last step with drafts; the entry
    after all rows is 0. Until a step's result is there, the host counts all its drafts as accepted.
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
        self.drafts = most_tokens > 1  # whether rows may have drafts
        layers = [dict(cache) for cache in arena.layers]
        self._pending_states = list[tuple[str | None, Tensor, list[Tensor]]]()
        self._spaced_states = list[tuple[str | None, Tensor, list[Tensor]]]()
        for number, tensor, pool in arena.states:
            own = {
                record.name: torch.zeros(
                    (lines * num_rows, length, *record.shape), dtype=DTYPES[record.dtype], device=platform.device
                )
                for record, lines, length in _records(tensor, most_tokens, interval)
            }
            layers[number] |= own
            if own and interval > 1 and tensor.spaced:
                self._spaced_states.append((tensor.flush, pool, list(own.values())))
            elif own:
                behind = [*own.values(), *constants.get((number, tensor.name), ())]
                self._pending_states.append((tensor.fold, pool, behind))
        self.layers: tuple[LayerCache, ...] = tuple(layers)
        self._pending = np.zeros(num_rows, np.int32)  # tokens of the row's last step, if it had drafts
        self._line = 2 * np.arange(num_rows, dtype=np.int32)  # the line that the row's next step reads
        self._start = np.full(num_rows, NOWHERE, np.int32)  # the start of the row's last step
        self._whole = np.zeros(num_rows, np.int32)  # tokens in the state that the last step read
        self._end = np.zeros(num_rows, np.int32)  # tokens in the state once the pending ones are folded
        self._slot = np.full(num_rows, NO_SLOT, np.int32)
        self._step = np.zeros(num_rows, np.int64)  # the row's last step
        self.missed = torch.zeros(num_rows + 1, dtype=torch.int64, device=platform.device)

    def concern(self, plan: StepPlan) -> bool:
        """Return whether a row of the plan has drafts or pending tokens."""
        rows = plan.rows
        return bool(rows.num_drafts.any()) or bool(self._pending[rows.row[: plan.num_decodes]].any())

    def arrays(self, plan: StepPlan, pad: Pad, verifies: bool) -> Arrays:
        """Return the columns of the step's decode rows, for RecordIndex and VerifyIndex.

        `pad(column, value)` pads each of them. Those of RecordIndex are there if some states are written every few
        tokens only, those of VerifyIndex if the step `verifies` drafts. Both share src, dst and cu_tokens.
        """
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
        """Return each row's mark and the slot for the state there, as columns whose names begin with `kind`.

        A mark counts from the oldest of the row's `behind` pending tokens. Rows without a mark have 0 and NO_SLOT.
        """
        rows, decodes = plan.rows, plan.num_decodes
        read, write, start = (column[:decodes] for column in (rows.read_slot, rows.write_slot, rows.start))
        # A row that goes on in another slot leaves a checkpoint in the old slot, which has to be complete.
        turns = (behind > 0) & (read != write) & (start % self.interval == 0)
        mark, mark_slot = np.where(turns, behind, 0), np.where(turns, read, NO_SLOT)
        saves = np.diff(rows.save_ptr[: decodes + 1])
        assert saves.max(initial=0) <= 1, "the tokens of a step pass one boundary at most"
        at, num_saves = np.flatnonzero(saves), int(saves.sum())
        mark[at] = rows.save_positions[:num_saves] - (start - behind)[at]
        mark_slot[at] = rows.save_slots[:num_saves]
        return {f"{kind}_mark": pad(mark, 0), f"{kind}_mark_dst": pad(mark_slot, NO_SLOT)}

    def _written(self, row: IntArray, start: IntArray) -> IntArray:
        """Return how many tokens the states in the rows' slots have.

        The state of a row that was not decoded yet has all tokens before its `start`.
        """
        before = self._start[row]
        return np.where(before < 0, start, np.maximum(self._whole[row], before // self.interval * self.interval))

    def newest_lines(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the lines of `single` records that the rows' next step reads, and their numbers of pending tokens."""
        return rows, self._pending[rows]

    def newest_of(self, layer: int, name: str, slots: Tensor, lines: Tensor, pending: Tensor) -> Tensor:
        """Return each row's newest entry `[N, ...]` of the convolution window `name` of a layer.

        It is the record of the row's newest pending token, or without one the last entry in the row's slot. `slots`,
        `lines` and `pending` are on the device, `[N]` int64.
        """
        window, pool = next((spec, pool) for number, spec, pool in self._states if (number, spec.name) == (layer, name))
        return self._ops.newest(pool[:, -1], self.layers[layer][window.records[0].name], slots, lines, pending)

    def late(self, rows: StepRows) -> IntArray:
        """Return each row's place in `missed`: its own if it is optimistic, else the place of the 0."""
        return np.where(rows.optimistic, rows.row, np.int32(len(self._line)))

    def behind(self, rows: StepRows) -> IntArray:
        """Return by how many tokens at most each row may start earlier than planned."""
        return np.where(rows.optimistic, self._pending[rows.row] - 1, 0)

    def issued(self, plan: StepPlan) -> None:
        """Note that the plan's step was issued, as if all its drafts were accepted. Call it after `arrays`."""
        rows, count = plan.rows, plan.num_decodes
        row, start, drafts = rows.row[:count], rows.start[:count], rows.num_drafts[:count]
        self._whole[row], self._start[row] = self._written(row, start), start
        self._pending[row] = np.where(drafts, 1 + drafts, 0)
        self._end[row] = (rows.start + rows.num_tokens)[:count]
        self._slot[row], self._step[row] = rows.write_slot[:count], plan.step
        self._line[row] ^= 1

    def apply_counts(self, plan: StepPlan, counts: IntArray) -> None:
        """Take rejected drafts off the rows of a plan, once its result is there.

        `counts` says how many positions of each sampled row count.
        """
        row, missed = plan.sampled_rows, 1 + plan.rows.num_drafts[plan.rows.samples] - counts
        is_last = self._step[row] == plan.step
        self._end[row] -= missed
        self._pending[row] -= np.where(is_last, missed, 0)
        self._start[row] -= np.where(is_last, 0, missed)

    def leave(self, removed: Iterable[int], moves: Iterable[Move]) -> None:
        """Bring the states of `removed` rows that stand at a block boundary up to date on the device.

        Then forgets the rows, and follows `moves` of slots.
        """
        gone = np.asarray(list(removed), np.int64)
        gone_whole = gone[(self._start[gone] >= 0) & (self._end[gone] % BLOCK_SIZE == 0)]
        self._fold(gone_whole[self._pending[gone_whole] > 0])
        self._flush(gone_whole)
        self._pending[gone], self._start[gone] = 0, NOWHERE
        for move in moves:
            if move.kind is MoveKind.SLOT and move.route is MoveRoute.ARENA:
                self._slot[self._slot == move.src] = move.dst

    def prepare(self) -> None:
        """Let the device compile the kernels for rows that leave, before there is one."""
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
        for name, pool, records in self._spaced_states:
            assert name is not None, "made for states that can be flushed"
            getattr(self._ops, name)(pool, index, records)

    def _upload(self, *columns: npt.NDArray[Any]) -> list[Tensor]:
        return [self._platform.upload(column.astype(np.int32)) for column in columns]


def records_bytes(layout: CacheLayout, num_rows: int, most_tokens: int, interval: int) -> int:
    """Return the bytes of the records of `num_rows` rows, with at most `most_tokens` tokens of a row in a step."""
    tensors = (tensor for spec in layout.states for tensor in spec.tensors)
    records = (each for tensor in tensors for each in _records(tensor, most_tokens, interval))
    return num_rows * sum(lines * length * record.num_bytes() for record, lines, length in records)


def _records(tensor: TensorSpec, most_tokens: int, interval: int) -> Iterator[tuple[TensorSpec, int, int]]:
    """Yield the records of a tensor: (spec, lines of each row, tokens of each line). None if it needs none."""
    if interval > 1 and tensor.spaced:
        for i, record in enumerate(tensor.spaced):
            # Records of updates (the first ones) are read and overwritten by one program. The others are read by many
            # programs, so that a step must not overwrite those that it reads.
            yield record, 1, interval - 1 + (1 + (i > 0)) * most_tokens
    elif most_tokens > 1:
        for record in tensor.records:
            yield record, 1 if record.single else 2, most_tokens
