"""Linear layers in torch: the plain product, and one whose rows do not depend on the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

FIXED_ROWS = 16  # rows per product in deterministic mode


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


def linear_fixed_rows(x: Tensor, packed: PackedLinear) -> Tensor:
    """As `linear`, in products of exactly FIXED_ROWS rows, the last one padded with zeros.

    BLAS libraries choose kernels and splits by the shape of a product, so a row's bits depend on the number
    of rows beside it; at one fixed shape they do not.
    """
    num_rows = x.shape[0]
    whole = num_rows // FIXED_ROWS * FIXED_ROWS
    out = x.new_empty(num_rows, packed.weight.shape[0])
    for start in range(0, whole, FIXED_ROWS):
        # Products of a slice and of a padded copy see the same strides only if both are contiguous.
        block = x[start : start + FIXED_ROWS].contiguous()
        out[start : start + FIXED_ROWS] = F.linear(block, packed.weight, packed.bias)
    if whole < num_rows:
        block = x.new_zeros(FIXED_ROWS, x.shape[1])
        block[: num_rows - whole] = x[whole:]
        out[whole:] = F.linear(block, packed.weight, packed.bias)[: num_rows - whole]
    return out
