"""The tiles of matrix products, and which tile is fastest on a Hopper GPU.

`python -m benchmarks.gpu_linear` times the choices next to the vendor's library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product `y[M, N] = x[M, K] W[N, K]^T` is cut into programs.

    Each program computes `rows x outputs` elements over K, in steps of `width`, or over one of `splits` parts of K,
    whose fp32 sums a second launch adds in order. A tile of 1 row does not use the matrix units and computes several
    rows one by one. With `turned`, the weights are the left operand of the matrix instruction. That operand has at
    least 64 rows, so few rows of x waste no work. Programs of `group` row tiles run over the same weights before the
    next group starts.

    With the matrix units, every tile without splits adds K in the same order, 16 at a time. The bits of a row therefore
    depend only on the splits.
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
        """The sizes that every product kernel is launched with."""
        return {"OUTPUTS": self.outputs, "WIDTH": self.width, "num_warps": self.num_warps}


SINGLE_OUTPUTS, SINGLE_ROWS = 64, 32  # up to here single rows without the matrix units are fastest
FEWEST_OUTPUTS = 512  # up to here K is split for a few rows, because there are too few programs
FEW_OUTPUTS = 8192  # up to here wide tiles would leave processors idle
MOST_GATED, FEW_GATED = 12288, 16  # with more outputs and rows, the library is faster for gated products
NARROW, MEDIUM = 2048, 4224  # outputs up to which all tiles of 32 x 64, or of 64 x 64, of 128 rows run at once
PARTS_ROWS = 640  # up to here K is split for few outputs if the reader adds the partial sums
FIXED_SPLITS, FIXED_UNIT = 4, 256  # splits of a wide K with fixed bits, each a multiple of the steps of every tile
LARGEST = 128  # rows; above, the vendor's library is faster except for few outputs
WIDE_SCALED = 2048  # columns; below, a second launch costs more than splits gain
FEW_SCALED = 4  # rows; above, FP8 x FP8 products are faster, by the library or by ours


@dataclass(frozen=True, slots=True)
class Choices:
    """The tiles of one kind of bfloat16 shape: pairs of (largest number of rows, tile).

    Above `fast` rows the vendor's library is faster. The tiles continue up to LARGEST rows for when the library cannot
    be used."""

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
    (*_FEW.tiles[:3], (32, Tile(32, 64, 128, 4, 5, splits=2, turned=True)), *_FEW.tiles[-2:]), fast=64
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
    """Return the fastest tile for a product, or None for the vendor's library. `parts`: the reader adds the splits."""
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
    """Return the fastest tile for a gated product, or None to multiply both halves with the vendor's library."""
    if dtype != torch.bfloat16 or (num_outputs > MOST_GATED and num_rows > FEW_GATED):
        return None
    return _GATED.fastest(num_rows)


def fixed_splits(width: int) -> int:
    """Return the number of splits of K, which does not depend on the number of rows."""
    return FIXED_SPLITS if width > FEW_OUTPUTS and width % (FIXED_SPLITS * FIXED_UNIT) == 0 else 1


def fixed_tile(num_rows: int, num_outputs: int, width: int, dtype: torch.dtype) -> Tile:
    """Return a tile that gives a row the same bits for every number of rows."""
    if dtype != torch.bfloat16:
        return Tile(32, 32, 32, 4, 2)
    splits = fixed_splits(width)
    # A single row also uses the matrix units, so that its bits are those of a larger batch.
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
    """Return `fixed_tile` for a gated product, or None to multiply both halves with `fixed_tile`."""
    if dtype != torch.bfloat16 or fixed_splits(width) > 1:
        return None
    if num_outputs <= FEW_OUTPUTS and 64 < num_rows <= LARGEST:  # otherwise half of the processors would be idle
        return Tile(128, 64, 64, 4, 6, turned=True)
    return _GATED.up_to(max(num_rows, 2))


def wide_tile(num_rows: int) -> Tile:
    """Return the tile for fp32 weights with a few hundred outputs and a bfloat16 x."""
    if num_rows == 1:
        return Tile(1, 1, 1024, 4, 3, overlaps=True)
    if num_rows <= 128:
        return Tile(16 if num_rows <= 32 else 64, 64, 64, 4, 3, splits=14, turned=True, overlaps=True)
    return Tile(128, 64, 64, 4, 3, turned=True)


def scaled_tile(
    num_rows: int, num_outputs: int, width: int, gated: bool, dtype: torch.dtype, *, alone: bool, narrows: bool
) -> Tile | None:
    """Return the fastest tile for FP8 weights, or None for the vendor's library.

    `alone`: one row can be computed without the matrix units. `narrows`: activations can be rounded to FP8 too."""
    few = num_outputs <= FEW_OUTPUTS and width >= WIDE_SCALED and not gated and dtype == torch.bfloat16
    if num_rows > (2 * LARGEST if few and narrows and num_outputs <= WIDE_SCALED else LARGEST):
        return None
    if num_rows == 1 and alone and dtype == torch.bfloat16:
        return one_scaled_tile(num_outputs)
    if num_rows <= FEW_SCALED or not narrows:
        tile = fixed_scaled_tile(num_rows, num_outputs, gated, dtype)
        return replace(tile, splits=4) if few else tile
    if num_rows <= 16:
        return _few_narrow_tile(num_rows, num_outputs, gated, few)
    if not few and num_rows > 32:
        return None
    if gated:
        return Tile(64, 32, 128, 4, 4, narrows=True)
    if not few:
        return Tile(32, 128, 128, 4, 3, splits=2, turned=True, overlaps=True, narrows=True)
    if num_rows > (LARGEST if num_outputs <= WIDE_SCALED else 64):
        return Tile(LARGEST, 64, 128, 4, 4, splits=4, overlaps=True, narrows=True)
    rows = 64 if num_rows > 32 and width > FEW_OUTPUTS else 32
    splits = 8 if width > FEW_OUTPUTS or (num_outputs <= WIDE_SCALED and num_rows <= 64) else 4
    return Tile(rows, 128, 128, 4, 4, splits=splits, turned=True, overlaps=True, narrows=True)


def _few_narrow_tile(num_rows: int, num_outputs: int, gated: bool, few: bool) -> Tile:
    """Return the tile for 5 to 16 rows of FP8 activations and FP8 weights, of `few` outputs or others."""
    tile = Tile(16, 64, 128, 4, 4, turned=True, overlaps=True, narrows=True)
    if gated:
        return replace(tile, outputs=32, turned=False)
    if few:
        return replace(tile, splits=8)
    if num_outputs > FEW_OUTPUTS:
        return replace(tile, outputs=64 if num_rows <= 8 else 128, splits=2)
    return replace(tile, outputs=32, turned=False)


def one_scaled_tile(num_outputs: int) -> Tile:
    """Return the tile for one row without the matrix units."""
    if num_outputs > FEW_OUTPUTS:
        return Tile(1, 16, 128, 2, 6, overlaps=True)
    if num_outputs > WIDE_SCALED:
        return Tile(1, 8, 512, 1, 4, overlaps=True)
    return Tile(1, 4, 512, 2, 5, overlaps=True)


def fixed_scaled_tile(num_rows: int, num_outputs: int, gated: bool, dtype: torch.dtype) -> Tile:
    """Return a tile for FP8 weights that gives a row the same bits for every number of rows.

    Each product adds 128 values of K before it is scaled, and K is not split."""
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
