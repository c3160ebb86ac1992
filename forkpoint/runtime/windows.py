"""The positions that a step with drafts samples, and which of them count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.ops.rows.columns import WindowColumns
from forkpoint.runtime.step_inputs import ranges, sampled_tokens
from forkpoint.sched.plan import IntArray, StepRows

Accept: TypeAlias = Callable[[Tensor, Tensor, WindowColumns], Tensor]

NO_DRAFT = -3  # behind a row's last draft: equal to no id, and not what stands for logits that are not finite


@dataclass(frozen=True, slots=True)
class Windows:
    """Sampled rows with their positions, row after row: one for each row, and one more for each of its drafts.

    `drafts[p]` is the id that the row supposed to follow position `p`. A position counts if all ids sampled before it
    in its row were the drafts there.
    """

    sizes: IntArray  # [R] positions of each row
    starts: IntArray  # [R]
    drafts: IntArray  # [P], TO_DRAFT where only the device knows

    @classmethod
    def of(cls, rows: StepRows) -> Windows:
        """Of a plan's sampled rows."""
        sizes = 1 + rows.num_drafts[rows.samples]
        ends = np.cumsum(sizes, dtype=np.int32)
        drafts = rows.tokens.take(sampled_tokens(rows) + 1, mode="clip")
        drafts[ends - 1] = NO_DRAFT
        return cls(sizes, ends - sizes, drafts)

    def spread(self, values: IntArray) -> npt.NDArray[np.int64]:
        """A value of each row, one more for each of its positions after the first: so do outputs count on."""
        return ranges(values, self.sizes)

    def accept(self, operator: Accept, token_ids: Tensor, finite: Tensor, columns: WindowColumns) -> Tensor:
        """What the operator says of these windows. Nothing is waited for."""
        return operator(token_ids, finite, columns)

    def mask(self, counts: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
        """Whether each position counts `[P]`, where so many of each row do; all on the device."""
        ends, num_positions = starts + counts, len(self.drafts)
        return torch.arange(num_positions, device=ends.device) < ends.repeat_interleave(
            sizes, output_size=num_positions
        )

    def kept(self, counts: IntArray) -> npt.NDArray[np.int64]:
        """The positions that count, where so many of each row do."""
        return ranges(self.starts, counts)

    def drafts_before(self, positions: list[int]) -> npt.NDArray[np.int64]:
        """For those positions the drafts before them in their rows `[2, N]`: index into `positions`, id."""
        first = np.repeat(self.starts, self.sizes)
        pairs = [(i, self.drafts[p]) for i, at in enumerate(positions) for p in range(first[at], at)]
        return np.asarray(pairs, np.int64).reshape(-1, 2).T.copy()
