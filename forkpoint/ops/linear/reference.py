"""Linear layers in torch."""

from __future__ import annotations

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
    """Keep the weight as it is, or widened from FP8; torch needs no packing."""
    return PackedLinear(dense(weight), bias)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """`x[T, K] -> y[T, N]` in x's dtype."""
    return F.linear(x, packed.weight, packed.bias)


def linear_silu_mul(product: Linear, silu_mul: SiluMul, x: Tensor, packed: Any) -> Tensor:
    """`x[T, K] -> y[T, I]` for a packed `[2I, K]` weight, gate rows first, by a linear layer and a gate."""
    return silu_mul(product(x, packed))


def prepare_linear_heads(prepare: PrepareLinear, weight: Tensor) -> list[Any]:
    """Pack `[H, N, K]` for a linear layer for each head."""
    return [prepare(own.contiguous(), None) for own in weight]


def linear_heads(product: Linear, x: Tensor, packed: list[Any]) -> Tensor:
    """`x[T, H, K] -> y[T, H, N]`."""
    return torch.stack([product(x[:, head], own) for head, own in enumerate(packed)], dim=1)
