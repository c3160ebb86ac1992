"""A sum and its layer norm in Triton, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.rounding import next_power_of_2


@triton.jit
def add_layer_norm_kernel(x, added, weight, bias, total, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """Store one row of `x + added`, rounded, and of its norm. All rows are dense."""
    row, columns = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    inside = columns < D
    value = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(added + row + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + row + columns, rounded, mask=inside)
    value = rounded.to(tl.float32)
    mean = tl.sum(value, 0) / D
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (centred * scale * factor + offset).to(out.dtype.element_ty), mask=inside)


def add_layer_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (layer norm of `x + added`, `x + added`), all `[T, D]`."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[1]
    rows = (x.contiguous(), added.contiguous(), weight, bias, total, out)
    add_layer_norm_kernel[(len(x),)](*rows, eps, D=size, BLOCK=next_power_of_2(size))
    return out, total
