"""What decoding rows record of their tokens between two writes of their recurrent states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from forkpoint.cache.layout import CacheLayout, LayerSpec, StateSpec, TensorSpec
from forkpoint.models.context import LayerCache
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.buffers import DTYPES, ArenaBuffer
from forkpoint.sched.plan import IntArray, StepPlan

NOWHERE = -1  # where a row goes on that the last step did not decode


class StateRecords:
    """A line of each row for the tokens since the state in its slot, which is written at multiples of `interval`.

    The grid of checkpoints is a multiple of it, so that a slot is whole wherever it can become one. Positions alone
    decide, so a request's bits do not depend on what else ran. `layers` are the arena's, each with its records
    `[num_rows, interval, *shape]` under the names that the specs give them.
    """

    def __init__(self, arena: ArenaBuffer, num_rows: int, interval: int, platform: Platform) -> None:
        assert arena.layout.checkpoint_grid % interval == 0, "a checkpoint must be whole"
        self._interval, device = interval, platform.device
        self.layers: tuple[LayerCache, ...] = tuple(
            {
                **cache,
                **{
                    record.name: torch.zeros(
                        (num_rows, interval, *record.shape), dtype=DTYPES[record.dtype], device=device
                    )
                    for record in _records(own)
                },
            }
            for cache, own in zip(arena.layers, arena.layout.layers, strict=True)
        )
        self._next = np.full(num_rows, NOWHERE, np.int32)
        self._written = np.zeros(num_rows, np.int32)  # tokens of the state in the row's slot

    def leave(self, removed: Iterable[int]) -> None:
        """Rows leave the batch."""
        self._next[list(removed)] = NOWHERE

    def columns(self, plan: StepPlan) -> tuple[IntArray, IntArray, IntArray]:
        """The decode rows' columns of RecordIndex."""
        row, start = plan.rows.row[: plan.num_decodes], plan.rows.start[: plan.num_decodes]
        return row, start - self._before(row, start), self._folds(start).astype(np.int32)

    def confirm(self, plan: StepPlan) -> None:
        """The step is issued."""
        rows, count = plan.rows, plan.num_decodes
        self._next[rows.row[count:]] = NOWHERE
        row, start = rows.row[:count], rows.start[:count]
        self._written[row] = np.where(self._folds(start), start + 1, self._before(row, start))
        self._next[row] = start + 1

    def _before(self, row: IntArray, start: IntArray) -> IntArray:
        """Tokens of the states in the rows' slots; a row that was not decoded before has a whole one."""
        return np.where(self._next[row] == start, self._written[row], start)

    def _folds(self, start: IntArray) -> npt.NDArray[np.bool_]:
        folds: npt.NDArray[np.bool_] = (start + 1) % self._interval == 0
        return folds


def state_records_bytes(layout: CacheLayout, num_rows: int, interval: int) -> int:
    """What the lines of so many rows take."""
    return num_rows * interval * sum(record.num_bytes() for layer in layout.layers for record in _records(layer))


def _records(layer: LayerSpec) -> Iterator[TensorSpec]:
    for spec in layer:
        for tensor in spec.tensors if isinstance(spec, StateSpec) else ():
            if "recurrence_decode" in (tensor.operators or ()):
                yield from tensor.records
