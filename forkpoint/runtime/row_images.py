"""The images of the batch's rows: their rotary positions, and what a step needs of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forkpoint.images import ImageSpan, PositionArray, rope_positions, rope_shift
from forkpoint.models.image_rows import ImageRows
from forkpoint.sched.plan import AddedRow, StepRows


@dataclass(slots=True)
class StepImages:
    """The images of a step.

    `parts` are images in the order of their tokens in the step, and which of their tokens these are. `rope` are the
    positions `[3, L]` of the lines of ImageRows. `columns` have an int64 for each token of the step. `token_ids` are
    ids. A token's position plus its `rope_shift` is the line that rotates it in the model; plus its `draft_shift`, the
    line in the MTP head.
    """

    parts: list[tuple[ImageSpan, slice]] = field(default_factory=list)
    rope: PositionArray = field(default_factory=lambda: np.empty((3, 0), np.int64))
    columns: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's images. `places` are those of their tokens, `draft_places` also the place after each image."""

    images: tuple[ImageSpan, ...]
    places: PositionArray
    draft_places: PositionArray
    positions: PositionArray  # [3, end of the last image]

    def parts(self, start: int, end: int) -> list[tuple[ImageSpan, slice]]:
        """Return the images that have tokens in `[start, end)`, and which of their tokens these are."""
        spans = ((image, max(start - image.start, 0), end - image.start) for image in self.images)
        return [(image, slice(a, b)) for image, a, b in spans if a < image.num_tokens and b > 0]


class RowImages:
    """The images of the batch's rows.

    If `table.has_axes`, tokens are rotated by other positions than they are stored at: those of `forkpoint.images`,
    which says what `centred` means. The MTP head rotates a token by one more than the position of the token before it.
    In an image, and right after one, that differs from the token's own position.
    """

    def __init__(self, num_rows: int, table: ImageRows, centred: bool = False, drafts: bool = False) -> None:
        """`drafts`: the model's MTP head is used."""
        self._table, self._centred, self._has_drafts = table, centred, drafts and table.has_axes
        self.shift = np.zeros(num_rows + 1, np.int64)  # of a row's tokens after its last image; the last: padding's
        self._ends = np.zeros(num_rows + 1, np.int64)  # where a row's last image ends; 0: it has none
        self._rows: dict[int, _Row] = {}  # those that have images

    @property
    def has_axes(self) -> bool:
        """Whether tokens are rotated by other positions than they are stored at."""
        return self._table.has_axes

    def add(self, added: AddedRow) -> None:
        """Remember the images of a row that enters the batch."""
        images, row = added.images, added.row
        if images:
            places = np.concatenate([np.arange(image.start, image.end) for image in images])
            draft_places = np.union1d(places, [image.end for image in images])
            self._rows[row] = _Row(images, places, draft_places, rope_positions(images, self._centred))
            self._ends[row] = images[-1].end
            if self.has_axes:
                self.shift[row] = rope_shift(images, self._centred)

    def remove(self, row: int) -> None:
        """Forget a row that leaves the batch."""
        self.shift[row] = self._ends[row] = 0
        self._rows.pop(row, None)

    def step(self, rows: StepRows, recorded: bool) -> StepImages:
        """Return the images of a step.

        The column `token_ids` is there if the batch has images. The other columns are also there in a `recorded` step.
        """
        found = StepImages()
        if not self._rows and not recorded:
            return found
        shift = np.repeat(self.shift[rows.row], rows.num_tokens)
        if self.has_axes:
            found.columns["rope_shift"] = shift
        if self._has_drafts:
            found.columns["draft_shift"] = shift.copy()
        if self._rows:
            found.columns["token_ids"] = rows.tokens.astype(np.int64)
            self._fill(found, rows)
        return found

    def _fill(self, found: StepImages, rows: StepRows) -> None:
        """Enter the images of rows that start at or before the end of their last image."""
        firsts = np.cumsum(rows.num_tokens) - rows.num_tokens
        which = np.flatnonzero((rows.start <= self._ends[rows.row]) & (self._ends[rows.row] > 0))
        next_id, next_line, rope = self._table.first_id, self._table.first_line, list[PositionArray]()
        columns = (rows.row[which], rows.start[which], firsts[which], rows.num_tokens[which])
        for number, start, first, count in zip(*(column.tolist() for column in columns), strict=True):
            row, end, offset = self._rows[number], start + count, first - start  # from a place to an index in the step
            found.parts += row.parts(start, end)
            own = _between(start, end, row.places)
            found.columns["token_ids"][own + offset] = np.arange(next_id, next_id + len(own))
            next_id += len(own)
            text = np.arange(start, min(end, row.images[-1].end))  # and the images among it, which come next
            for name, draft, places in (("rope_shift", 0, row.places), ("draft_shift", 1, row.draft_places)):
                if name not in found.columns:
                    continue
                column = found.columns[name]
                column[text + offset] = row.positions[0, text] - text
                own = _between(start, end, places)
                column[own + offset] = np.arange(next_line, next_line + len(own)) - own
                rope.append(row.positions[:, np.maximum(own - draft, 0)] + draft)
                next_line += len(own)
        if rope:
            found.rope = np.concatenate(rope, axis=1)


def _between(start: int, end: int, places: PositionArray) -> PositionArray:
    """Return those of sorted places that are in `[start, end)`."""
    return places[slice(*np.searchsorted(places, (start, end)))]
