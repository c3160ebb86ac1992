"""Matrices in FP8 with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from forkpoint.ops.linear.packed import PackedMatrix, e4m3_numbers

BLOCK: Final = 128
CODES: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0  # largest magnitude of e4m3
LEAST_AMAX: Final = 1e-12  # lower bound of a largest magnitude, so that blocks of zeros have a nonzero scale
_PIECE_ROWS: Final = 4096  # rows widened together, which bounds the memory


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """An FP8 matrix: `codes[..., N, K]` in e4m3 (bytes on a device without 8-bit floats) times the scale of their
    block.

    A block is `rows` (128, or 1) by `columns` (128, or all K): `scales[..., ceil(N / rows), ceil(K / columns)]` fp32.
    `dtype` is the dtype of products with the matrix. Codes and scales are contiguous, as kernels expect.
    """

    codes: Tensor
    scales: Tensor
    rows: int
    columns: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        assert self.codes.is_contiguous() and self.scales.is_contiguous(), "kernels read rows that lie side by side"

    @property
    def shape(self) -> torch.Size:
        """`[..., N, K]`."""
        return self.codes.shape

    @property
    def by_block(self) -> bool:
        """Whether a row has one scale per 128 columns instead of one in all."""
        return self.scales.shape[-1] > 1 or self.columns == BLOCK

    def by_one_row(self, gated: bool) -> bool:
        """Return whether a product of one row can be computed without the matrix units.

        A program's outputs must share scales, or each row must have one scale. `gated`: the matrix has two halves."""
        return not self.by_block or (self.rows == BLOCK and (not gated or self.shape[-2] % (2 * BLOCK) == 0))

    def __getitem__(self, index: Any) -> ScaledMatrix:
        """Index the leading dims."""
        return ScaledMatrix(self.codes[index], self.scales[index], self.rows, self.columns, self.dtype)

    def dense(self) -> Tensor:
        """Return the widened matrix in `dtype`, each element rounded once."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        if self.codes.dim() > 2:
            for i, part in enumerate(out):
                part.copy_(self[i].dense())
            return out
        for index in range(0, self.shape[-2], _PIECE_ROWS):  # in pieces, because the fp32 copy is four times as large
            rows = slice(index, min(index + _PIECE_ROWS, self.shape[-2]))
            scales = self.scales[index // self.rows : -(-rows.stop // self.rows)].repeat_interleave(self.rows, 0)
            wide = scales[: rows.stop - index].repeat_interleave(self.columns, 1)[:, : self.shape[1]]
            out[rows] = _values(self.codes[rows]) * wide
        return out

    def by_row(self) -> ScaledMatrix:
        """Return the same matrix with the scales repeated for every row."""
        scales = self.scales.repeat_interleave(self.rows, -2)[..., : self.shape[-2], :].contiguous()
        return ScaledMatrix(self.codes, scales, 1, self.columns, self.dtype)

    def take_rows(self, order: Tensor) -> ScaledMatrix:
        """Return rows `order[N]` of a `[N, K]` matrix."""
        # Not every device can index FP8, so the codes are taken as bytes.
        codes = self.codes.view(torch.uint8)[order].view(self.codes.dtype)
        starts = order[:: self.rows]
        blocks = (starts[:, None] + torch.arange(self.rows, device=order.device)).flatten()[: len(order)]
        if not bool((starts % self.rows).any()) and torch.equal(order, blocks):
            return ScaledMatrix(codes, self.scales[starts // self.rows], self.rows, self.columns, self.dtype)
        return ScaledMatrix(codes, self.by_row().scales[order], 1, self.columns, self.dtype)

    def take_columns(self, start: int, end: int) -> ScaledMatrix:
        """Return columns `[start, end)` of `[N, K]`. `start` is the start of a block, or all columns share one
        block."""
        codes, first = self.codes[:, start:end].contiguous(), start // self.columns
        last = -(-end // self.columns)
        assert start % self.columns == 0 or last == first + 1, "a column of blocks would be cut"
        return replace(self, codes=codes, scales=self.scales[:, first:last].contiguous())


def _values(codes: Tensor) -> Tensor:
    """Return the codes as fp32 numbers."""
    return codes.float() if codes.dtype == CODES else e4m3_numbers(codes.device)[codes.int()]


UnpackedMatrix: TypeAlias = Tensor | ScaledMatrix
Matrix: TypeAlias = UnpackedMatrix | PackedMatrix


class ScaledLinear(NamedTuple):
    """A `[N, K]` weight in FP8, its optional `[N]` bias, and the scales for FP8 x FP8 products, if there are any."""

    weight: ScaledMatrix
    bias: Tensor | None
    library_scales: Tensor | None = None


class ScaledExperts(NamedTuple):
    """`PackedExperts` in FP8."""

    gate_up: ScaledMatrix
    down: ScaledMatrix

    @property
    def gated(self) -> bool:
        return self.gate_up.shape[1] != self.down.shape[2]

    @property
    def by_pairs(self) -> bool:
        """Whether `ScaledMatrix.by_one_row` holds for both matrices."""
        return self.gate_up.by_one_row(gated=True) and self.down.by_one_row(gated=False)


def multiplied(matrix: Matrix, by: float | Tensor) -> Matrix:
    """Multiply every row by one factor, or each row by its own of `by[N, 1]` fp32."""
    if isinstance(matrix, Tensor):
        return (matrix.float() * by).to(matrix.dtype)
    if isinstance(matrix, PackedMatrix):
        return matrix.multiplied(by)
    scaled = matrix if isinstance(by, float) else matrix.by_row()
    return replace(scaled, scales=scaled.scales * by)


def dense(matrix: Matrix) -> Tensor:
    """Return a plain matrix, widened if it is quantised."""
    return matrix if isinstance(matrix, Tensor) else matrix.dense()


def take_rows(matrix: Matrix, order: Tensor) -> Matrix:
    """Return rows `order[N]` of `[N, K]`."""
    return matrix[order] if isinstance(matrix, Tensor) else matrix.take_rows(order)


def take_columns(matrix: Matrix, start: int, end: int) -> Matrix:
    """Return columns `[start, end)` of `[N, K]`; see the `take_columns` of quantised matrices."""
    return matrix[:, start:end] if isinstance(matrix, Tensor) else matrix.take_columns(start, end)


def quantise(matrix: Tensor) -> ScaledMatrix:
    """Quantise `[..., N, K]` to FP8 in blocks of 128 x 128, each scaled so that its largest element is FP8_MAX."""
    num_rows, width = matrix.shape[-2:]
    padded = torch.nn.functional.pad(matrix.float(), (0, -width % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.view(*matrix.shape[:-2], -(-num_rows // BLOCK), BLOCK, -(-width // BLOCK), BLOCK)
    scales = blocks.abs().amax((-3, -1)).clamp_min(LEAST_AMAX) / FP8_MAX
    codes = (blocks / scales[..., :, None, :, None]).to(CODES).view(padded.shape)
    codes = codes[..., :num_rows, :width].contiguous()
    return ScaledMatrix(codes, scales, BLOCK, BLOCK, matrix.dtype)
