"""Linear layers on a GPU: our kernel where it is the faster, the vendor's library elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.kernel import multiply
from forkpoint.ops.linear.reference import PackedLinear
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.table import SiluMul


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """`choose(num_rows, num_outputs, width, dtype, gated)` gives the tile, or None for the library."""

    choose: Callable[[int, int, int, torch.dtype, bool], Tile | None]
    silu_mul: SiluMul

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """`x[T, K] -> y[T, N]` in x's dtype."""
        num_outputs, width = packed.weight.shape
        tile = self.choose(x.shape[0], num_outputs, width, x.dtype, False)
        if tile is None:
            return F.linear(x, packed.weight, packed.bias)
        return multiply(x, packed.weight, packed.bias, tile)

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """`x[T, K] -> y[T, I]` for a `[2I, K]` weight, gate rows first, without bias."""
        num_outputs, width = packed.weight.shape
        tile = self.choose(x.shape[0], num_outputs // 2, width, x.dtype, True)
        if tile is None:
            return self.silu_mul(self.linear(x, packed))
        return multiply(x, packed.weight, None, tile, gated=True)
