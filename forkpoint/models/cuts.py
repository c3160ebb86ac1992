"""The part of a tensor that one of several tensor-parallel ranks holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.ops.linear.packed import PER_WORD, PackedMatrix
from forkpoint.ops.linear.scaled import ScaledMatrix
from forkpoint.ops.ranks import Ranks

VOCABULARY_UNIT: Final = 64  # the rows of the output head are padded to a multiple of this on each rank


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is split over ranks along `axis`. None: every rank holds all of it.

    A tensor with one axis, such as a bias, is split only if `axis` is 0. The axis consists of consecutive `sections`.
    Each is (elements of one rank, number of neighbouring ranks that share the same elements). Without sections the
    whole axis is one section that is not shared. `padded` gives the axis that many elements, followed by zeros up to a
    multiple of VOCABULARY_UNIT for each rank.
    """

    axis: int | None = 0
    sections: tuple[tuple[int, int], ...] = ()
    padded: int = 0

    @property
    def length(self) -> int:
        """The number of elements of the axis that one rank holds, according to `sections`, which must be given."""
        return sum(own for own, _ in self.sections)

    def part(self, shape: Sequence[int], ranks: Ranks) -> Part:
        """Return the part of the whole tensor that this rank stores in a tensor of shape `shape`."""
        if ranks.size == 1 or self.axis is None or (self.axis and len(shape) == 1):
            return Part(tuple(shape))
        axis = self.axis % len(shape)
        length, spans = 0, list[tuple[int, int]]()
        if self.padded:
            first, last = (min(bound, self.padded) for bound in padded_span(self.padded, ranks))
            length, spans = self.padded, [(first, last)]
        else:
            for own, sharing in self.sections or ((shape[axis], 1),):
                first = length + ranks.rank // sharing * own
                spans.append((first, first + own))
                length += ranks.size // sharing * own
        return Part((*shape[:axis], length, *shape[axis + 1 :]), axis, tuple(spans), shape[axis])


ROWS: Final = Cut()
WHOLE: Final = Cut(None)  # every rank holds the whole tensor


@dataclass(frozen=True, slots=True)
class Part:
    """The intervals `spans` of axis `axis` of a tensor of shape `whole`, joined, then zeros up to `length`.

    Without spans the part is the whole tensor.
    """

    whole: tuple[int, ...]
    axis: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    length: int = 0

    def of(self, tensor: Any) -> Tensor:
        """Return the part of a whole tensor, perhaps a view. With spans, it takes safetensors' slice objects too."""
        lead = (slice(None),) * self.axis
        pieces: list[Tensor] = [tensor[(*lead, slice(*span))] for span in self.spans] or [tensor]
        missing = self.length - sum(end - start for start, end in self.spans)
        if missing:
            shape = (*self.whole[: self.axis], missing, *self.whole[self.axis + 1 :])
            pieces.append(pieces[0].new_zeros(shape))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, self.axis)

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of the part, so that the rest can be freed. Without spans, return the tensor itself."""
        if not self.spans:
            return tensor
        return self.of(tensor).clone()

    def of_packed(self, matrix: PackedMatrix) -> Tensor | PackedMatrix:
        """Return the part of a whole matrix in 4 bits.

        It is widened if its columns are not whole words, or not in the order of their codes.
        """
        if not self.spans:
            return matrix
        if self.axis == len(self.whole) - 1:
            (start, end), *_ = self.spans
            if matrix.order is not None or start % PER_WORD or end % PER_WORD:
                return self.copied(matrix.dense())
            return matrix.take_columns(start, end)
        zeros = None if matrix.zeros is None else self.copied(matrix.zeros)
        words, scales, factors = (self.copied(kept) for kept in (matrix.words, matrix.scales, matrix.factors))
        return replace(matrix, words=words, scales=scales, factors=factors, zeros=zeros)

    def of_scaled(self, codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> ScaledMatrix:
        """Build the part's matrix from its own `codes` and the whole matrix's `scales` of `rows` by `columns` blocks.

        If the part's rows do not end at block boundaries, each row gets a scale of its own. Raises ConfigError if a
        block would be split between columns.
        """
        if not self.spans:
            return ScaledMatrix(codes, scales, rows, columns, dtype)
        *_, num_rows, width = self.whole
        if self.axis == len(self.whole) - 1:
            (start, end), *_ = self.spans
            if columns == width:
                return ScaledMatrix(codes, scales, rows, codes.shape[-1], dtype)
            if start % columns or (end % columns and end != width):
                raise ConfigError(
                    f"tensor_parallel_size splits a matrix of {width} columns into pieces of {end - start}, within "
                    f"blocks of {columns} with one scale; give a smaller size, or --deterministic, which splits none"
                )
            scales = scales[..., start // columns : -(-end // columns)].contiguous()
            return ScaledMatrix(codes, scales, rows, columns, dtype)
        inner = [bound % rows and bound != num_rows for span in self.spans for bound in span]
        if any(inner) or any(end % rows for _, end in self.spans[:-1]):
            scales, rows = scales.repeat_interleave(rows, -2), 1
        pieces = [scales[..., start // rows : -(-end // rows), :] for start, end in self.spans]
        return ScaledMatrix(codes, torch.cat(pieces, -2), rows, columns, dtype)


def share(count: int, what: str, ranks: Ranks, shared: bool = False) -> int:
    """Return how many of `count` items each rank holds.

    With `shared`, several ranks may hold the same item if there are more ranks than items. Raises ConfigError if the
    items cannot be divided evenly.
    """
    if count % ranks.size and not (shared and ranks.size % count == 0):
        raise ConfigError(f"tensor_parallel_size={ranks.size} does not divide the model's {count} {what}")
    return max(1, count // ranks.size)


def sharing(count: int, ranks: Ranks) -> int:
    """Return how many neighbouring ranks hold the same item when `count` items are shared over `ranks`."""
    return max(1, ranks.size // count)


def refuse_context(ranks: Ranks) -> None:
    """Raise ConfigError if the tokens of a layer with attention to chosen keys would have to be dealt to ranks."""
    if ranks.context.size > 1:
        raise ConfigError(
            f"decode_context_parallel_size={ranks.context.size} is not possible for this model: attention to chosen "
            "keys needs all keys on each rank; leave it out"
        )


def check_context(copies: int, what: str, ranks: Ranks) -> None:
    """Raise ConfigError if the ranks that would keep tokens in turn do not all hold the same heads.

    Without context parallelism, `copies` neighbouring ranks hold the same keys and values of a model's `what`.
    """
    size = ranks.context.size
    if copies % size:
        remedy = "leave it out: each rank has KV heads of its own"
        if copies > 1:
            remedy = f"give a size that divides {copies}, the ranks that hold the same KV head"
        raise ConfigError(
            f"decode_context_parallel_size={size} is not possible with tensor_parallel_size={ranks.size} and {what}: "
            f"{remedy}"
        )


def rows(*lengths: int) -> Cut:
    """Return the cut of rows in one section for each of `lengths`, the rows of one rank."""
    return Cut(0, tuple((length, 1) for length in lengths))


def whole(length: int) -> Cut:
    """Return the cut of `length` rows that every rank holds."""
    return Cut(None, ((length, 1),))


def padded_span(units: int, ranks: Ranks) -> tuple[int, int]:
    """Return the range of units, from 0, that this rank holds of `units`, padded at the end on several ranks.

    It may be padding only.
    """
    if ranks.size == 1:
        return 0, units
    length = -(-units // (VOCABULARY_UNIT * ranks.size)) * VOCABULARY_UNIT
    return ranks.rank * length, (ranks.rank + 1) * length
