"""Matrices in FP8 with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

BLOCK: Final = 128
CODES: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0  # of e4m3
LEAST_AMAX: Final = 1e-12  # so that zeros have a scale to divide by
_PIECE_ROWS: Final = 4096  # widened together


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """`codes[..., N, K]` in e4m3, or their bytes for a device without 8-bit floats, each times the scale of its block.

    A block is `rows` (128, or 1) by `columns` (128, or all K): `scales[..., ceil(N / rows), ceil(K / columns)]` fp32.
    `dtype` is the one that the matrix is computed with.
    """

    codes: Tensor
    scales: Tensor
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """`[..., N, K]`."""
        return self.codes.shape

    @property
    def by_block(self) -> bool:
        """Whether a row has a scale for each 128 columns, not one."""
        return self.scales.shape[-1] > 1 or self.columns == BLOCK

    def by_one_row(self, gated: bool) -> bool:
        """Whether products of one row can do without the matrix units: a program's outputs share scales, or a row has
        one. `gated`: the matrix has two halves."""
        return not self.by_block or (self.rows == BLOCK and (not gated or self.shape[-2] % (2 * BLOCK) == 0))

    def __getitem__(self, index: Any) -> ScaledMatrix:
        """Some of the leading dims' matrices."""
        return ScaledMatrix(self.codes[index], self.scales[index], self.rows, self.columns, self.dtype)

    def dense(self) -> Tensor:
        """The products in `dtype`, each rounded once."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        if self.codes.dim() > 2:
            for i, part in enumerate(out):
                part.copy_(self[i].dense())
            return out
        for index in range(0, self.shape[-2], _PIECE_ROWS):  # the wide copy of all would be four times as large
            rows = slice(index, min(index + _PIECE_ROWS, self.shape[-2]))
            scales = self.scales[index // self.rows : -(-rows.stop // self.rows)].repeat_interleave(self.rows, 0)
            wide = scales[: rows.stop - index].repeat_interleave(self.columns, 1)[:, : self.shape[1]]
            out[rows] = _values(self.codes[rows]) * wide
        return out

    def by_row(self) -> ScaledMatrix:
        """The same matrix with a scale for every row of a block."""
        scales = self.scales.repeat_interleave(self.rows, -2)[..., : self.shape[-2], :].contiguous()
        return ScaledMatrix(self.codes, scales, 1, self.columns, self.dtype)

    def take_rows(self, order: Tensor) -> ScaledMatrix:
        """Rows `order[N]` of a `[N, K]` matrix."""
        codes = self.codes.view(torch.uint8)[order].view(self.codes.dtype)  # not every device can index FP8
        starts = order[:: self.rows]
        blocks = (starts[:, None] + torch.arange(self.rows, device=order.device)).flatten()[: len(order)]
        if not bool((starts % self.rows).any()) and torch.equal(order, blocks):
            return ScaledMatrix(codes, self.scales[starts // self.rows], self.rows, self.columns, self.dtype)
        return ScaledMatrix(codes, self.by_row().scales[order], 1, self.columns, self.dtype)

    def take_columns(self, start: int, end: int) -> ScaledMatrix:
        """Columns `[start, end)` of `[N, K]`: from the start of a block on, or all in one."""
        codes, first = self.codes[:, start:end], start // self.columns
        last = -(-end // self.columns)
        assert start % self.columns == 0 or last == first + 1, "a column of blocks would be cut"
        return ScaledMatrix(codes, self.scales[:, first:last], self.rows, self.columns, self.dtype)


def _values(codes: Tensor) -> Tensor:
    """In fp32."""
    if codes.dtype == CODES:
        return codes.float()
    all_of_them = torch.arange(256, dtype=torch.uint8).view(CODES).float()
    return all_of_them.to(codes.device)[codes.int()]


Matrix: TypeAlias = Tensor | ScaledMatrix


class ScaledLinear(NamedTuple):
    """A `[N, K]` weight in FP8, its optional `[N]` bias, and scales for products of FP8 by FP8, if there are any."""

    weight: ScaledMatrix
    bias: Tensor | None
    library_scales: Tensor | None = None


class ScaledExperts(NamedTuple):
    """As `PackedExperts`, in FP8."""

    gate_up: ScaledMatrix
    down: ScaledMatrix

    @property
    def gated(self) -> bool:
        return self.gate_up.shape[1] != self.down.shape[2]

    @property
    def by_pairs(self) -> bool:
        """As `ScaledMatrix.by_one_row`, of both matrices."""
        return self.gate_up.by_one_row(gated=True) and self.down.by_one_row(gated=False)


def multiplied(matrix: Matrix, by: float | Tensor) -> Matrix:
    """Every row times one factor, or each times its own of `by[N, 1]` fp32."""
    if isinstance(matrix, Tensor):
        return (matrix.float() * by).to(matrix.dtype)
    scaled = matrix if isinstance(by, float) else matrix.by_row()
    return replace(scaled, scales=scaled.scales * by)


def dense(matrix: Matrix) -> Tensor:
    """A plain matrix, whatever it is given."""
    return matrix.dense() if isinstance(matrix, ScaledMatrix) else matrix


def take_rows(matrix: Matrix, order: Tensor) -> Matrix:
    """Rows `order[N]` of `[N, K]`."""
    return matrix.take_rows(order) if isinstance(matrix, ScaledMatrix) else matrix[order]


def take_columns(matrix: Matrix, start: int, end: int) -> Matrix:
    """Columns `[start, end)` of `[N, K]`; see `ScaledMatrix.take_columns`."""
    return matrix.take_columns(start, end) if isinstance(matrix, ScaledMatrix) else matrix[:, start:end]


def quantise(matrix: Tensor) -> ScaledMatrix:
    """`[..., N, K]` in blocks of 128 by 128, whose largest element becomes e4m3's."""
    num_rows, width = matrix.shape[-2:]
    padded = torch.nn.functional.pad(matrix.float(), (0, -width % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.view(*matrix.shape[:-2], -(-num_rows // BLOCK), BLOCK, -(-width // BLOCK), BLOCK)
    scales = blocks.abs().amax((-3, -1)).clamp_min(LEAST_AMAX) / FP8_MAX
    codes = (blocks / scales[..., :, None, :, None]).to(CODES).view(padded.shape)
    codes = codes[..., :num_rows, :width].contiguous()
    return ScaledMatrix(codes, scales, BLOCK, BLOCK, matrix.dtype)
