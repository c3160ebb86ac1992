"""The positions that a step with drafts samples, and which of them are accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.ops.metadata import ranges
from forkpoint.runtime.step_inputs import sampled_tokens
from forkpoint.sched.plan import IntArray, StepRows

NO_DRAFT = -3  # after a row's last draft; differs from every id and from NOT_FINITE


@dataclass(frozen=True, slots=True)
class DraftSpans:
    """The positions of the sampled rows, row after row. A row's span is one position, and one more for each draft.

    `drafts[p]` is the draft after position `p`. A position counts if all drafts before it in its row were accepted.
    """

    sizes: IntArray  # [R] number of positions
    starts: IntArray  # [R] first position
    drafts: IntArray  # [P] TO_DRAFT if only the device has the id

    @classmethod
    def of(cls, rows: StepRows) -> DraftSpans:
        """Return the spans of a plan's sampled rows."""
        sizes = 1 + rows.num_drafts[rows.samples]
        ends = np.cumsum(sizes, dtype=np.int32)
        drafts = rows.tokens.take(sampled_tokens(rows) + 1, mode="clip")
        drafts[ends - 1] = NO_DRAFT
        return cls(sizes, ends - sizes, drafts)

    def spread(self, values: IntArray) -> npt.NDArray[np.int64]:
        """Return `[P]`: for each position its row's value, of `values[R]`, plus its number in the span."""
        return ranges(values, self.sizes)

    def mask(self, counts: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
        """Return whether each position counts, bool `[P]`, from the `counts[R]` of each row; all on the device.

        `starts` and `sizes` are the spans' own.
        """
        ends = (starts + counts).repeat_interleave(sizes, output_size=len(self.drafts))
        return torch.arange(len(self.drafts), device=ends.device) < ends

    def kept(self, counts: IntArray) -> npt.NDArray[np.int64]:
        """Return the positions that count, from the number of them `counts[R]` in each row."""
        return ranges(self.starts, counts)

    def drafts_before(self, positions: list[int]) -> npt.NDArray[np.int64]:
        """Return the drafts before these positions in their rows `[2, N]`: index into `positions`, and id."""
        first = np.repeat(self.starts, self.sizes)
        pairs = [(i, self.drafts[p]) for i, at in enumerate(positions) for p in range(first[at], at)]
        return np.asarray(pairs, np.int64).reshape(-1, 2).T.copy()
