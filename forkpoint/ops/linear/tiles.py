"""How a matrix product is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product `y[M, N] = x[M, K] W[N, K]^T` is cut into programs.

    Each program computes `rows x outputs` elements over K in steps of `width`, or over one of `splits` parts of K,
    whose fp32 sums a second launch adds in their order. With `turned` the weights are the left operand of the matrix
    instruction, which has at least 64 rows on its left: few rows of x then waste no work. Programs of `group` row
    tiles take turns over the same weights before the next group's do.
    """

    rows: int
    outputs: int
    width: int
    num_warps: int
    num_stages: int
    splits: int = 1
    turned: bool = False
    group: int = 8


def fastest_tile(num_rows: int, num_outputs: int, width: int, dtype: torch.dtype, gated: bool) -> Tile | None:
    """The tile for a product of this shape; None where the vendor's library is faster."""
    return None


def fixed_tile(num_rows: int, num_outputs: int, width: int, dtype: torch.dtype, gated: bool) -> Tile:
    """A tile that gives a row the same bits, whatever the number of rows."""
    return Tile(32, 32, 32, 4, 2) if dtype == torch.float32 else Tile(64, 64, 64, 4, 3)
