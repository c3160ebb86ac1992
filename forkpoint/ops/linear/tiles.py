"""How a matrix product is cut into programs, and which cut is the fastest on a GPU of Hopper's kind.

`python -m benchmarks.gpu_linear` times the choices beside the vendor's library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product `y[M, N] = x[M, K] W[N, K]^T` is cut into programs.

    Each program computes `rows x outputs` elements over K in steps of `width`, or over one of `splits` parts of K,
    whose fp32 sums a second launch adds in their order. A tile of 1 row does without the matrix units, and takes
    several rows one by one. With `turned`
    the weights are the left operand of the matrix instruction, which has at least 64 rows on its left: few rows of x
    then waste no work. Programs of `group` row tiles take turns over the same weights before the next group's do.

    Over the matrix units every tile without splits adds up K in the same order, 16 at a time, so
    that the bits of a row depend on the splits alone.
    """

    rows: int
    outputs: int
    width: int
    num_warps: int
    num_stages: int
    splits: int = 1
    turned: bool = False
    group: int = 8
    overlaps: bool = False  # starts while the launch before ends; beyond a few rows that does not pay
    narrows: bool = False  # rounds x to FP8 first, where weights are in FP8

    @property
    def sizes(self) -> dict[str, Any]:
        """What every kernel that it cuts a product for is told."""
        return {"OUTPUTS": self.outputs, "WIDTH": self.width, "num_warps": self.num_warps}


SINGLE_OUTPUTS, SINGLE_ROWS = 64, 32  # up to here each row by itself, without the matrix units, is the fastest
FEWEST_OUTPUTS = 512  # up to here so few programs work that K is cut for more, on few rows
FEW_OUTPUTS = 8192  # up to here the programs of wide tiles would leave processors idle
MOST_GATED, FEW_GATED = 12288, 16  # of more outputs and rows gated products are faster by the library
NARROW, MEDIUM = 2048, 4224  # outputs up to which tiles of 32 by 64, and of 64 by 64, of 128 rows fit side by side
PARTS_ROWS = 640  # up to here K is cut for as few outputs where nothing has to add the splits up
FIXED_SPLITS, FIXED_UNIT = 4, 256  # of wide K where bits are fixed, each of whole steps of any tile
LARGEST = 128  # rows; above, the vendor's library is faster but for few outputs
WIDE_SCALED = 2048  # columns; below, a second launch costs more than splits bring
FEW_SCALED = 16  # rows; above, products of both sides in FP8 are faster, by it or ours


@dataclass(frozen=True, slots=True)
class Choices:
    """For one kind of shape, bfloat16: (rows up to which, tile). Beyond `fast` rows the vendor's library is faster; the
    rest go on to LARGEST where it is no choice."""

    tiles: tuple[tuple[int, Tile], ...]
    fast: int

    def fastest(self, num_rows: int) -> Tile | None:
        return self.up_to(num_rows) if num_rows <= self.fast else None

    def up_to(self, num_rows: int) -> Tile | None:
        return next((tile for most, tile in self.tiles if num_rows <= most), None)


_FEW: Final[Choices] = Choices(
    (
        (1, Tile(1, 8, 512, 4, 3, overlaps=True)),
        (8, Tile(16, 32, 256, 4, 6, overlaps=True)),
        (16, Tile(16, 32, 256, 4, 6)),
        (32, Tile(32, 64, 128, 4, 6, turned=True)),
        (64, Tile(64, 32, 256, 4, 4)),
        (128, Tile(64, 64, 128, 4, 6, turned=True)),
    ),
    fast=32,
)
_FEWEST: Final[Choices] = Choices(
    (
        (1, Tile(1, 1, 1024, 4, 3, overlaps=True)),
        (16, Tile(16, 64, 128, 4, 4, splits=4, turned=True, overlaps=True)),
        (32, Tile(32, 64, 128, 4, 4, splits=4, turned=True, overlaps=True)),
        *_FEW.tiles[-2:],
    ),
    fast=32,
)
_FEW_WIDE: Final[Choices] = Choices(
    (
        *_FEW.tiles[:3],
        (32, Tile(32, 64, 128, 4, 5, splits=2, turned=True)),
        *_FEW.tiles[-2:],
    ),
    fast=64,
)
_MANY: Final[Choices] = Choices(
    (
        (1, Tile(1, 16, 256, 4, 3, overlaps=True)),
        (8, Tile(16, 64, 128, 4, 4, turned=True, overlaps=True)),
        (16, Tile(16, 64, 128, 4, 4, turned=True)),
        (32, Tile(32, 128, 128, 8, 4, turned=True)),
        (64, Tile(64, 128, 128, 4, 4)),
        (128, Tile(128, 128, 64, 8, 6)),
    ),
    fast=64,
)
_GATED: Final[Choices] = Choices(
    (
        (1, Tile(1, 4, 2048, 4, 3, overlaps=True)),
        (8, Tile(16, 32, 128, 4, 3, overlaps=True)),
        (16, Tile(16, 32, 128, 4, 3)),
        (32, Tile(32, 64, 128, 4, 3)),
        (64, Tile(64, 64, 64, 4, 4)),
        (128, Tile(128, 128, 64, 8, 4, turned=True)),
    ),
    fast=64,
)


def fastest_tile(num_rows: int, num_outputs: int, width: int, dtype: torch.dtype, parts: bool = False) -> Tile | None:
    """The tile for a product of this shape; None for the vendor's library. `parts`: sums of splits are left to what
    reads them."""
    if dtype != torch.bfloat16:
        return None
    if parts and SINGLE_OUTPUTS < num_outputs <= FEWEST_OUTPUTS and SINGLE_ROWS < num_rows <= PARTS_ROWS:
        splits = 4 if num_rows <= 2 * LARGEST else 2
        return Tile(32 if num_rows <= LARGEST else 64, 64, 128, 4, 4, splits=splits, turned=True, overlaps=True)
    if num_outputs <= SINGLE_OUTPUTS and num_rows <= 512:
        alone = Tile(1, 2, 1024, 2, 2, overlaps=True)
        return alone if num_rows <= SINGLE_ROWS else Tile(16, 16, 256, 4, 6, overlaps=True)
    return _choices(num_outputs, width).fastest(num_rows)


def fastest_gated_tile(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tile | None:
    """The tile for a gated product; None: take the halves together by the vendor's library."""
    if dtype != torch.bfloat16 or (num_outputs > MOST_GATED and num_rows > FEW_GATED):
        return None
    return _GATED.fastest(num_rows)


def fixed_splits(width: int) -> int:
    """Of K, whatever the number of rows."""
    return FIXED_SPLITS if width > FEW_OUTPUTS and width % (FIXED_SPLITS * FIXED_UNIT) == 0 else 1


def fixed_tile(num_rows: int, num_outputs: int, width: int, dtype: torch.dtype) -> Tile:
    """A tile that gives a row the same bits, whatever the number of rows."""
    if dtype != torch.bfloat16:
        return Tile(32, 32, 32, 4, 2)
    splits = fixed_splits(width)
    # A single row goes through the matrix units, as others do.
    tile = _choices(num_outputs, width).up_to(max(num_rows, 2))
    if tile is None:
        tile = Tile(128, 128, 64, 8, 4) if num_rows <= 512 else Tile(256, 128, 64, 8, 3, turned=True, group=4)
    elif num_rows > 64 and splits > 1:
        tile = Tile(128, 64, 128, 4, 4, turned=True)
    elif num_rows > 64 and num_outputs <= NARROW:
        tile = Tile(32, 64, 128, 4, 6, turned=True)
    elif num_rows > 64 and MEDIUM < num_outputs <= FEW_OUTPUTS:
        tile = Tile(64, 128, 128, 4, 4)
    return replace(tile, splits=splits)


def fixed_gated_tile(num_rows: int, num_outputs: int, width: int, dtype: torch.dtype) -> Tile | None:
    """The same for a gated product; None: take the halves together by `fixed_tile`."""
    if dtype != torch.bfloat16 or fixed_splits(width) > 1:
        return None
    if num_outputs <= FEW_OUTPUTS and 64 < num_rows <= LARGEST:  # else half of the processors would be idle
        return Tile(128, 64, 64, 4, 6, turned=True)
    return _GATED.up_to(max(num_rows, 2))


def wide_tile(num_rows: int) -> Tile:
    """The tile for weights in fp32, of a few hundred outputs, and an x in bfloat16."""
    if num_rows == 1:
        return Tile(1, 1, 1024, 4, 3, overlaps=True)
    if num_rows <= 128:
        return Tile(16 if num_rows <= 32 else 64, 64, 64, 4, 3, splits=14, turned=True, overlaps=True)
    return Tile(128, 64, 64, 4, 3, turned=True)


def scaled_tile(
    num_rows: int, num_outputs: int, width: int, gated: bool, dtype: torch.dtype, *, alone: bool, narrows: bool
) -> Tile | None:
    """The tile for weights in FP8; None for the vendor's library. `alone`: one row can do without the matrix units;
    `narrows`: activations can be rounded to FP8 too."""
    few = num_outputs <= FEW_OUTPUTS and width >= WIDE_SCALED and not gated and dtype == torch.bfloat16
    if num_rows > (2 * LARGEST if few and narrows and num_outputs <= WIDE_SCALED else LARGEST):
        return None
    if num_rows == 1 and alone and dtype == torch.bfloat16:
        return one_scaled_tile(num_outputs)
    if num_rows <= FEW_SCALED or not narrows:
        tile = fixed_scaled_tile(num_rows, num_outputs, gated, dtype)
        return replace(tile, splits=4) if few else tile
    if not few and not (gated and num_rows <= 32):
        return None
    if gated:
        return Tile(64, 32, 128, 4, 4, narrows=True)
    if num_rows > (LARGEST if num_outputs <= WIDE_SCALED else 64):
        return Tile(LARGEST, 64, 128, 4, 4, splits=4, overlaps=True, narrows=True)
    rows = 64 if num_rows > 32 and width > FEW_OUTPUTS else 32
    splits = 8 if width > FEW_OUTPUTS or (num_outputs <= WIDE_SCALED and num_rows <= 64) else 4
    return Tile(rows, 128, 128, 4, 4, splits=splits, turned=True, overlaps=True, narrows=True)


def one_scaled_tile(num_outputs: int) -> Tile:
    """For one row, without the matrix units."""
    if num_outputs > FEW_OUTPUTS:
        return Tile(1, 16, 128, 2, 6, overlaps=True)
    if num_outputs > WIDE_SCALED:
        return Tile(1, 8, 512, 1, 4, overlaps=True)
    return Tile(1, 4, 512, 2, 5, overlaps=True)


def fixed_scaled_tile(num_rows: int, num_outputs: int, gated: bool, dtype: torch.dtype) -> Tile:
    """The same without splits: each product adds up 128 of K before it is scaled, so that all such tiles give a row
    the same bits."""
    if dtype != torch.bfloat16:
        return Tile(32, 32, 32, 4, 2)
    if num_rows <= 16:
        return Tile(16, 32, 128, 4, 6 if num_outputs > FEW_OUTPUTS and not gated else 4, overlaps=num_rows <= 8)
    if num_rows <= 32:
        return Tile(32, 64, 128, 4, 4) if gated else Tile(32, 128, 128, 4, 4)
    if num_rows <= 64:
        return Tile(64, 32, 128, 4, 3)
    return Tile(LARGEST, 64, 128, 8 if gated else 4, 3, turned=True)


def _choices(num_outputs: int, width: int) -> Choices:
    if num_outputs > FEW_OUTPUTS:
        return _MANY
    if num_outputs <= FEWEST_OUTPUTS:
        return _FEWEST
    return _FEW_WIDE if width > FEW_OUTPUTS else _FEW
