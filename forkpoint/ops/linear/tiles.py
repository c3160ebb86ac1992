"""How a matrix product is cut into programs, and which cut is the fastest on a GPU of Hopper's kind.

`python -m forkpoint.bench.gpu_linear` times the choices beside the vendor's library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product `y[M, N] = x[M, K] W[N, K]^T` is cut into programs.

    Each program computes `rows x outputs` elements over K in steps of `width`, or over one of `splits` parts of K,
    whose fp32 sums a second launch adds in their order. A tile of 1 row does without the matrix units. With `turned`
    the weights are the left operand of the matrix instruction, which has at least 64 rows on its left: few rows of x
    then waste no work. Programs of `group` row tiles take turns over the same weights before the next group's do.

    Over the matrix units every tile without splits adds up K in the same order, 16 at a time, so that the bits of a
    row depend on the splits alone.
    """

    rows: int
    outputs: int
    width: int
    num_warps: int
    num_stages: int
    splits: int = 1
    turned: bool = False
    group: int = 8


FEW_OUTPUTS = 8192  # up to here the programs of wide tiles would leave processors idle
LARGEST = 128  # rows; above, the vendor's library is faster on every shape

# Rows up to which -> tile, by kind of shape, for bfloat16; beyond the last the vendor's library.
Choices = Mapping[int, Tile]
_FEW: Final[Choices] = MappingProxyType(
    {
        1: Tile(1, 8, 512, 4, 3),
        16: Tile(16, 32, 256, 4, 6),
        32: Tile(32, 64, 128, 4, 6, turned=True),
    }
)
_FEW_WIDE: Final[Choices] = MappingProxyType(
    {
        1: Tile(1, 8, 512, 4, 3),
        16: Tile(16, 32, 256, 4, 6),
        32: Tile(32, 64, 128, 4, 5, splits=2, turned=True),
        64: Tile(64, 64, 128, 4, 5, splits=2, turned=True),
    }
)
_MANY: Final[Choices] = MappingProxyType(
    {
        1: Tile(1, 16, 256, 4, 3),
        16: Tile(16, 64, 128, 4, 4, turned=True),
        32: Tile(32, 128, 128, 8, 4, turned=True),
        64: Tile(64, 128, 128, 4, 4),
    }
)
_GATED: Final[Choices] = MappingProxyType(
    {
        1: Tile(1, 4, 2048, 4, 3),
        16: Tile(16, 32, 128, 4, 3),
        32: Tile(32, 64, 64, 4, 4, turned=True),
        64: Tile(64, 64, 64, 4, 4, turned=True),
        128: Tile(128, 128, 64, 8, 4, turned=True),
    }
)


def fastest_tile(num_rows: int, num_outputs: int, width: int, dtype: torch.dtype, gated: bool) -> Tile | None:
    """The tile for a product of this shape, `num_outputs` of each half if gated; None for the vendor's library."""
    if dtype != torch.bfloat16 or num_rows > LARGEST:
        return None
    return _of_bucket(_choices(num_outputs, width, gated), num_rows)


def fixed_tile(num_rows: int, num_outputs: int, width: int, dtype: torch.dtype, gated: bool) -> Tile | None:
    """A tile that gives a row the same bits, whatever the number of rows; None if gated: take the halves together."""
    if dtype != torch.bfloat16:
        return Tile(32, 32, 32, 4, 2)
    if num_rows <= LARGEST:
        tile = _of_bucket(_choices(num_outputs, width, gated), max(num_rows, 2))
        if tile is not None:
            return replace(tile, splits=1)
    if gated:
        return None
    if num_rows <= 512:
        return Tile(128, 128, 64, 8, 4)
    return Tile(256, 128, 64, 8, 3, turned=True, group=4)


def _choices(num_outputs: int, width: int, gated: bool) -> Choices:
    if gated:
        return _GATED
    if num_outputs > FEW_OUTPUTS:
        return _MANY
    return _FEW_WIDE if width > FEW_OUTPUTS else _FEW


def _of_bucket(choices: Choices, num_rows: int) -> Tile | None:
    return next((tile for most, tile in choices.items() if num_rows <= most), None)
