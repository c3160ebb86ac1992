"""Linear layers on a GPU: our kernels where they are faster, the vendor's library elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.linear.fp8_kernel import library_scales, multiply_fp8
from forkpoint.ops.linear.fragments import FragmentLinear, FragmentMatrix, fits_fragments, in_fragments
from forkpoint.ops.linear.fragments_kernel import MOST_GATED_ROWS, fragment_tile, multiply_fragments
from forkpoint.ops.linear.kernel import multiply, multiply_both
from forkpoint.ops.linear.packed import FourBitLinear, PackedMatrix
from forkpoint.ops.linear.packed_kernel import multiply_packed, widen_packed
from forkpoint.ops.linear.reference import PackedLinear
from forkpoint.ops.linear.scaled import Matrix, ScaledLinear, ScaledMatrix
from forkpoint.ops.linear.tiles import (
    FEW_GATED,
    LARGEST,
    Tile,
    fastest_gated_tile,
    fastest_tile,
    fixed_gated_tile,
    fixed_scaled_tile,
    fixed_tile,
    scaled_tile,
    wide_tile,
)
from forkpoint.ops.linear.unpack_kernel import widen_fragments
from forkpoint.ops.linear.widen_kernel import widen
from forkpoint.ops.table import SiluMul
from forkpoint.platforms.table import traits_of

AnyLinear: TypeAlias = PackedLinear | ScaledLinear | FourBitLinear | FragmentLinear


def within(tile: Tile, device: torch.device, gated_fp8: bool = False) -> Tile:
    """Return `tile`, shrunk to the device's limits, which changes no bits. `gated_fp8`: of a gated FP8 product."""
    most = launch_table(device)
    if gated_fp8 and tile.outputs > most.most_gated_outputs:
        tile = replace(tile, outputs=most.most_gated_outputs)
    if tile.rows == 1:
        return tile if tile.width <= most.most_row_width else replace(tile, width=most.most_row_width)
    return tile if tile.rows <= most.most_product_rows else replace(tile, rows=most.most_product_rows)


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """The linear operators of a GPU. With `deterministic`, a row's bits do not depend on the number of rows."""

    deterministic: bool
    silu_mul: SiluMul

    def prepare_linear(self, weight: Matrix, bias: Tensor | None) -> AnyLinear:
        """Keep weight and bias as loaded, with the library's scales if the device multiplies FP8.

        Weights in 4 bits are put into fragments if bits may depend on the number of rows. Devices that drop the masks
        of gathered loads get them widened.
        """
        if isinstance(weight, PackedMatrix):
            if traits_of(weight.words.device).masks_gathers:
                if self.deterministic or not fits_fragments(weight):
                    return FourBitLinear(weight, bias)
                return FragmentLinear(in_fragments(weight), bias)
            weight = weight.dense()
        if not isinstance(weight, ScaledMatrix):
            assert weight.is_contiguous(), "kernels read rows that lie side by side"
            return PackedLinear(weight, bias)
        multiplies = traits_of(weight.codes.device).multiplies_fp8
        return ScaledLinear(weight, bias, library_scales(weight) if multiplies else None)

    def linear(self, x: Tensor, packed: AnyLinear, parts: bool = False) -> Tensor:
        """Multiply `x[T, K]` by the weight; return `y[T, N]` in x's dtype. With `parts`, y may be `Parts`."""
        if isinstance(packed, FragmentLinear):
            return _of_fragments(x, *packed, parts)
        if isinstance(packed, FourBitLinear):
            return self._of_four_bits(x, *packed)
        num_outputs, width = packed.weight.shape
        if isinstance(packed, ScaledLinear):
            tile = self._scaled_tile(x, packed, gated=False)
            if tile is not None:
                return multiply(x, packed.weight, packed.bias, tile, parts=parts)
            if packed.library_scales is not None:
                return multiply_fp8(x, packed.weight, packed.library_scales, packed.bias)
            return F.linear(x, widen(packed.weight), packed.bias)
        shape = x.shape[0], num_outputs, width, x.dtype
        tile = fixed_tile(*shape) if self.deterministic else fastest_tile(*shape, parts and packed.bias is None)
        if tile is None:
            return F.linear(x, packed.weight, packed.bias)
        return multiply(x, packed.weight, packed.bias, within(tile, x.device), parts=parts)

    def _of_four_bits(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> Tensor:
        x = _ordered(x, weight.order)
        if self.deterministic or len(x) <= LARGEST:
            return multiply_packed(x, weight, bias)
        return F.linear(x, widen_packed(weight), bias)

    def linear_both(
        self,
        x: Tensor,
        packed: AnyLinear,
        beside: AnyLinear,
    ) -> tuple[Tensor, Tensor] | None:
        """Multiply one row by an FP8 matrix and by a plain one in one launch (`OpTable.linear_both`).

        None: the row, a bias or a tile does not fit.
        """
        if not isinstance(packed, ScaledLinear) or not isinstance(beside, PackedLinear) or len(x) != 1:
            return None
        tile = self._scaled_tile(x, packed, gated=False)
        if tile is None or tile.rows != 1 or packed.bias is not None or beside.bias is not None:
            return None
        return multiply_both(x, packed.weight, beside.weight, tile)

    @staticmethod
    def wide(x: Tensor, packed: PackedLinear) -> Tensor:
        """Multiply a bfloat16 `x[T, K]` by fp32 weights; return `y[T, N]` in fp32."""
        return multiply(x, packed.weight, packed.bias, wide_tile(x.shape[0]))

    def linear_silu_mul(self, x: Tensor, packed: AnyLinear) -> Tensor:
        """Return `silu(x gate^T) * (x up^T)`, `[T, I]`, for a `[2I, K]` weight, gate rows first, without bias."""
        if isinstance(packed, FragmentLinear):
            if len(x) > MOST_GATED_ROWS:
                return self.silu_mul(self.linear(x, packed))
            few, x = fragment_tile(len(x), packed.weight, gated=True), _ordered(x, packed.weight.order)
            return multiply_fragments(x, packed.weight, None, few, gated=True)
        if isinstance(packed, FourBitLinear):
            return self.silu_mul(self.linear(x, packed))
        if isinstance(packed, ScaledLinear):
            scaled_tile = self._scaled_tile(x, packed, gated=True)
            if scaled_tile is None:
                return self.silu_mul(self.linear(x, packed))
            return multiply(x, packed.weight, None, scaled_tile, gated=True)
        num_rows, num_outputs, width = x.shape[0], packed.weight.shape[0] // 2, packed.weight.shape[1]
        fastest = fastest_gated_tile(num_rows, num_outputs, x.dtype)
        tile = fixed_gated_tile(num_rows, num_outputs, width, x.dtype) if self.deterministic else fastest
        if tile is None and not self.deterministic:
            return self.silu_mul(F.linear(x, packed.weight))
        if tile is None or (tile.rows > FEW_GATED and not traits_of(x.device).masks_gathers):
            return self.silu_mul(self.linear(x, packed))
        return multiply(x, packed.weight, None, within(tile, x.device), gated=True)

    def prepare_linear_heads(self, weight: Tensor) -> Tensor:
        """Keep `[H, N, K]` as it is."""
        return weight.contiguous()

    def linear_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply each head by its weight: `x[T, H, K] -> y[T, H, N]` in x's dtype."""
        if self.deterministic:
            return torch.stack([self.linear(x[:, h], PackedLinear(own, None)) for h, own in enumerate(weight)], dim=1)
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    def _scaled_tile(self, x: Tensor, packed: ScaledLinear, gated: bool) -> Tile | None:
        """Return our tile for FP8 weights, or None for the vendor's library (in FP8 or with widened weights)."""
        num_rows, num_outputs, width = x.shape[0], packed.weight.shape[0] // (1 + gated), packed.weight.shape[1]
        alone, narrows = packed.weight.by_one_row(gated), packed.library_scales is not None
        masks = traits_of(x.device).masks_gathers
        if gated and (num_rows > launch_table(x.device).most_gated_rows or not (masks or alone)):
            return None
        if self.deterministic:
            tile: Tile | None = fixed_scaled_tile(num_rows, num_outputs, gated, x.dtype)
        else:
            alone = alone and masks
            tile = scaled_tile(num_rows, num_outputs, width, gated, x.dtype, alone=alone, narrows=narrows)
        return None if tile is None else within(tile, x.device, gated)


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    """Return the columns of x in the order of a weight's codes."""
    return x if order is None else x.index_select(1, order)


def _of_fragments(x: Tensor, weight: FragmentMatrix, bias: Tensor | None, parts: bool) -> Tensor:
    x = _ordered(x, weight.order)
    if len(x) > LARGEST:
        return F.linear(x, widen_fragments(weight), bias)
    return multiply_fragments(x, weight, bias, fragment_tile(len(x), weight), parts=parts)
