"""The images of the batch's rows: their rotary positions, and what a step needs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.images import ImageSpan, PositionArray, rope_positions, rope_shift
from forkpoint.models.context import ImageInputs, ImagePositions
from forkpoint.platforms.platform import Platform
from forkpoint.sched.plan import AddedRow, StepRows


class _Found(NamedTuple):
    """The parts of ImageInputs and ImagePositions, image by image."""

    at: list[PositionArray]
    parts: list[Tensor]
    rope: list[PositionArray]
    draft_at: list[PositionArray]
    draft_rope: list[PositionArray]


class RowImages:
    """The images of the batch's rows.

    With `has_axes`, tokens are rotated by other positions than they are stored at: those of `forkpoint.images`, which
    says what `centred` means.
    """

    def __init__(self, num_rows: int, has_axes: bool, centred: bool = False) -> None:
        self._has_axes, self._centred = has_axes, centred
        self.shift = np.zeros(num_rows + 1, np.int64)  # of a row's tokens after its last image; the last: padding's
        self._ends = np.zeros(num_rows + 1, np.int64)  # where a row's last image ends; 0: it has none
        self._images: dict[int, tuple[ImageSpan, ...]] = {}  # of rows that have some
        self._positions: dict[int, PositionArray] = {}  # the same rows' positions up to there

    @property
    def is_empty(self) -> bool:
        """Whether no row has images. All tokens are rotated by their own positions then."""
        return not self._images

    def add(self, added: AddedRow) -> None:
        """Remember the images of a row that enters the batch."""
        if added.images:
            row, end = added.row, added.images[-1].end
            self._images[row], self._ends[row] = added.images, end
            self._positions[row] = np.broadcast_to(np.arange(end), (3, end))
            if self._has_axes:
                self._positions[row] = rope_positions(added.images, self._centred)
                self.shift[row] = rope_shift(added.images, self._centred)

    def remove(self, row: int) -> None:
        """Forget a row that leaves the batch."""
        self.shift[row] = self._ends[row] = 0
        self._images.pop(row, None)
        self._positions.pop(row, None)

    def shifts(self, rows: StepRows) -> npt.NDArray[np.int64]:
        """Return for each token `[T]` what to add to its position before rotation; images' tokens: to get the time."""
        shifts = np.repeat(self.shift[rows.row], rows.num_tokens)
        if self._images:
            for row, start, begin, count in self._before_last_image(rows):
                time = self._positions[row][0, start : start + count]
                shifts[begin : begin + len(time)] = time - np.arange(start, start + len(time))
        return shifts

    def inputs(
        self, rows: StepRows, embeddings: Callable[[ImageSpan], Tensor], platform: Platform
    ) -> ImageInputs | None:
        """Return what a step with image tokens needs; None for a step without them.

        `embeddings` returns those of all tokens of an image.
        """
        if not self._images:
            return None
        found = _Found([], [], [], [], [])
        for row, start, begin, count in self._before_last_image(rows):
            positions, offset = self._positions[row], begin - start  # from a position to an index in the step
            for image in self._images[row]:
                own = np.arange(max(start, image.start), min(start + count, image.end))
                if len(own):
                    found.at.append(own + offset)
                    found.parts.append(embeddings(image)[own[0] - image.start : own[-1] + 1 - image.start])
                    found.rope.append(positions[:, own])
                own = np.arange(max(start, image.start), min(start + count, image.end + 1))
                found.draft_at.append(own + offset)
                found.draft_rope.append(positions[:, np.maximum(own - 1, 0)] + 1)
        if not found.at:
            return None
        upload = platform.upload
        rope: ImagePositions | None = None
        if self._has_axes:
            rope = ImagePositions(
                upload(np.concatenate(found.rope, axis=1)),
                upload(np.concatenate(found.draft_at)),
                upload(np.concatenate(found.draft_rope, axis=1)),
            )
        return ImageInputs(upload(np.concatenate(found.at)), torch.cat(found.parts), rope)

    def _before_last_image(self, rows: StepRows) -> list[tuple[int, int, int, int]]:
        """Return the rows of a step that start at or before the end of their last image.

        Each is (row, first position, first token in the step, number of tokens).
        """
        firsts = np.cumsum(rows.num_tokens) - rows.num_tokens
        which = np.flatnonzero((rows.start <= self._ends[rows.row]) & (self._ends[rows.row] > 0))
        columns = (rows.row, rows.start, firsts, rows.num_tokens)
        return list(zip(*(column[which].tolist() for column in columns), strict=True))
