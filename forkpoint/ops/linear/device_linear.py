"""Linear layers on a GPU: our kernels where they are the faster, the vendor's library elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.gated_kernel import multiply_gated
from forkpoint.ops.linear.kernel import multiply
from forkpoint.ops.linear.reference import PackedLinear
from forkpoint.ops.linear.tiles import GatedTile, fastest_gated_tile, fastest_tile, fixed_gated_tile, fixed_tile
from forkpoint.ops.table import SiluMul


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """`linear` and `linear_silu_mul`; with `deterministic` a row's bits do not depend on the number of rows."""

    deterministic: bool
    silu_mul: SiluMul

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """`x[T, K] -> y[T, N]` in x's dtype."""
        choose = fixed_tile if self.deterministic else fastest_tile
        num_outputs, width = packed.weight.shape
        tile = choose(x.shape[0], num_outputs, width, x.dtype)
        if tile is None:
            return F.linear(x, packed.weight, packed.bias)
        return multiply(x, packed.weight, packed.bias, tile)

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """`x[T, K] -> y[T, I]` for a `[2I, K]` weight, gate rows first, without bias."""
        choose = fixed_gated_tile if self.deterministic else fastest_gated_tile
        tile = choose(x.shape[0], x.dtype)
        if tile is None:
            return self.silu_mul(self.linear(x, packed))
        if isinstance(tile, GatedTile):
            return multiply_gated(x, packed.weight, tile)
        return multiply(x, packed.weight, None, tile, gated=True)
