"""The part of a tensor that one of several ranks has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.ops.linear.scaled import ScaledMatrix
from forkpoint.ops.ranks import Ranks

VOCABULARY_UNIT: Final = 64  # rows of the output head, which is padded to as many for each rank


@dataclass(frozen=True, slots=True)
class Cut:
    """Axis `axis` of a tensor is cut, if one is; of a tensor with one axis, such as a bias, only axis 0.

    It has `sections` behind each other, each as (elements of one rank, how many ranks next to each other have the
    same); none: one, which no two ranks share. With `padded` it has so many elements, and zeros behind the last make up
    a multiple of VOCABULARY_UNIT for each rank.
    """

    axis: int | None = 0
    sections: tuple[tuple[int, int], ...] = ()
    padded: int = 0

    @property
    def length(self) -> int:
        """What a rank has of the axis, of a cut with sections."""
        return sum(own for own, _ in self.sections)

    def part(self, shape: Sequence[int], ranks: Ranks) -> Part | None:
        """Of the tensor that a rank has in `shape`; None: all of it."""
        if ranks.size == 1 or self.axis is None or (self.axis and len(shape) == 1):
            return None
        axis = self.axis % len(shape)
        length, spans = 0, list[tuple[int, int]]()
        if self.padded:
            first, last = (min(bound, self.padded) for bound in padded_span(self.padded, ranks))
            length, spans = self.padded, [(first, last)]
        for own, sharing in () if self.padded else self.sections or ((shape[axis], 1),):
            first = length + ranks.rank // sharing * own
            spans.append((first, first + own))
            length += ranks.size // sharing * own
        return Part((*shape[:axis], length, *shape[axis + 1 :]), axis, tuple(spans), shape[axis])


ROWS: Final = Cut()
WHOLE: Final = Cut(None)  # on every rank


@dataclass(frozen=True, slots=True)
class Part:
    """Intervals `spans` of axis `axis`, put together, of a tensor of shape `whole`; then zeros up to `length`."""

    whole: tuple[int, ...]
    axis: int
    spans: tuple[tuple[int, int], ...]
    length: int

    def of(self, tensor: Any) -> Tensor:
        """Out of the whole tensor, or of what safetensors gives slices of."""
        lead = (slice(None),) * self.axis
        pieces = [tensor[(*lead, slice(*span))] for span in self.spans]
        missing = self.length - sum(end - start for start, end in self.spans)
        if missing:
            shape = (*self.whole[: self.axis], missing, *self.whole[self.axis + 1 :])
            pieces.append(pieces[0].new_zeros(shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.axis)

    def of_scaled(self, codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> ScaledMatrix:
        """`codes` are the part's, `scales` the whole matrix's. Rows that do not end with blocks get a scale each.

        Raises ConfigError where columns of blocks would be cut.
        """
        *_, num_rows, width = self.whole
        if self.axis == len(self.whole) - 1:
            (start, end), *_ = self.spans
            if columns == width:
                return ScaledMatrix(codes, scales, rows, codes.shape[-1], dtype)
            if start % columns or (end % columns and end != width):
                raise ConfigError(
                    f"tensor_parallel_size cuts a matrix of {width} columns into pieces of {end - start}, within "
                    f"blocks of {columns} that have one scale; give a smaller size, or --deterministic, which cuts none"
                )
            return ScaledMatrix(codes, scales[..., start // columns : -(-end // columns)], rows, columns, dtype)
        inner = [bound % rows and bound != num_rows for span in self.spans for bound in span]
        if any(inner) or any(end % rows for _, end in self.spans[:-1]):
            scales, rows = scales.repeat_interleave(rows, -2), 1
        pieces = [scales[..., start // rows : -(-end // rows), :] for start, end in self.spans]
        return ScaledMatrix(codes, torch.cat(pieces, -2), rows, columns, dtype)


def share(count: int, what: str, ranks: Ranks, shared: bool = False) -> int:
    """How many each rank has; with `shared` fewer than there are ranks belong to several. Raises ConfigError."""
    if count % ranks.size and not (shared and ranks.size % count == 0):
        raise ConfigError(f"tensor_parallel_size={ranks.size} does not divide the model's {count} {what}")
    return max(1, count // ranks.size)


def sharing(count: int, ranks: Ranks) -> int:
    """How many ranks next to each other then have the same."""
    return max(1, ranks.size // count)


def rows(*lengths: int) -> Cut:
    """Of a tensor whose rows are so many sections, of which a rank has so many rows each."""
    return Cut(0, tuple((length, 1) for length in lengths))


def whole(length: int) -> Cut:
    """Of so many rows that every rank has."""
    return Cut(None, ((length, 1),))


def padded_span(units: int, ranks: Ranks) -> tuple[int, int]:
    """The run of units that a rank has where zeros are put behind the last one, and may be all that it has."""
    if ranks.size == 1:
        return 0, units
    length = -(-units // (VOCABULARY_UNIT * ranks.size)) * VOCABULARY_UNIT
    return ranks.rank * length, (ranks.rank + 1) * length
