"""Which linear operator to take on a machine with bf16 matrix tiles (AMX)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forkpoint.ops.linear.scaled import Matrix, dense
from forkpoint.ops.table import Linear, PrepareLinear

TILE_ROWS = 16
FEW_ROWS = 12  # up to here the weights' way from memory is the cost, and ours reads them once


def has_matrix_tiles() -> bool:
    """Whether oneDNN multiplies bf16 matrices in hardware tiles here, many times faster than fp32 vectors do."""
    return bool(torch.cpu._is_amx_tile_supported())


@dataclass(frozen=True, slots=True)
class TileLinear:
    """Ours for a few rows, `many` (torch, so oneDNN) for more, padded to one of few numbers of them: oneDNN generates
    and keeps code for each number of rows, which takes longer than the product. bf16 weights are held twice.

    The two round differently, so a row's bits depend on the batch: not for deterministic tables.
    """

    prepare_few: PrepareLinear
    few: Linear
    prepare_many: PrepareLinear
    many: Linear

    def prepare(self, weight: Matrix, bias: Tensor | None) -> tuple[Any, Any | None]:
        """For a few rows, and for more; for these None in fp32, which tiles do not take."""
        wide = self.prepare_many(dense(weight), bias) if weight.dtype == torch.bfloat16 else None
        return self.prepare_few(weight, bias), wide

    def __call__(self, x: Tensor, packed: tuple[Any, Any | None]) -> Tensor:
        """`x[T, K] -> y[T, N]`."""
        (few, many), num_rows = packed, x.shape[0]
        if many is None or num_rows <= FEW_ROWS:
            return self.few(x, few)
        padding = padded_rows(num_rows) - num_rows
        if not padding:
            return self.many(x, many)
        return self.many(torch.nn.functional.pad(x, (0, 0, 0, padding)), many)[:num_rows]


def padded_rows(num_rows: int) -> int:
    """The next of the sizes 16, 32, ... 128, 160, ... 256, 320, ...: four to a doubling, and no less than a tile."""
    unit = max(TILE_ROWS, 1 << max(num_rows - 1, 0).bit_length() >> 3)
    return -(-num_rows // unit) * unit
