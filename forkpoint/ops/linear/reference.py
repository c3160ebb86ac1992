"""Linear layers in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class PackedLinear(NamedTuple):
    """A `[N, K]` weight and its optional `[N]` bias, as loaded."""

    weight: Tensor
    bias: Tensor | None


def prepare_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Keep the weight as it is; torch needs no packing."""
    return PackedLinear(weight, bias)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """`x[T, K] -> y[T, N]` in x's dtype."""
    return F.linear(x, packed.weight, packed.bias)
