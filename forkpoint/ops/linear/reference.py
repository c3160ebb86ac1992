"""Linear layers in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.scaled import Matrix, dense
from forkpoint.ops.table import Linear, PrepareLinear, SiluMul


class PackedLinear(NamedTuple):
    """A `[N, K]` weight and its optional `[N]` bias, as loaded."""

    weight: Tensor
    bias: Tensor | None


def prepare_linear(weight: Matrix, bias: Tensor | None) -> PackedLinear:
    """Keep the weight as it is, or widen it from FP8. torch needs no packing."""
    return PackedLinear(dense(weight), bias)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """Multiply `x[T, K]` by the weight; return `y[T, N]` in x's dtype."""
    return F.linear(x, packed.weight, packed.bias)


@dataclass(frozen=True, slots=True)
class OfLinear:
    """Linear operators composed of `prepare_linear`, `linear` and `silu_mul`."""

    prepare_linear: PrepareLinear
    linear: Linear
    silu_mul: SiluMul

    def linear_silu_mul(self, x: Tensor, packed: Any) -> Tensor:
        """Return `silu(x gate^T) * (x up^T)`, `[T, I]`, for a packed `[2I, K]` weight, gate rows first."""
        return self.silu_mul(self.linear(x, packed))

    def prepare_linear_heads(self, weight: Tensor) -> list[Any]:
        """Pack `[H, N, K]` as one linear layer per head."""
        return [self.prepare_linear(own.contiguous(), None) for own in weight]

    def linear_heads(self, x: Tensor, packed: list[Any]) -> Tensor:
        """Multiply each head by its weight: `x[T, H, K] -> y[T, H, N]`."""
        return torch.stack([self.linear(x[:, head], own) for head, own in enumerate(packed)], dim=1)
