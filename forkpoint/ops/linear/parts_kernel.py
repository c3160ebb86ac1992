"""Partial sums (`Parts`) added up in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.linear.sums_kernel import gate
from forkpoint.ops.rounding import ceil_div
from forkpoint.ops.unmade import Parts

BLOCK = tl.constexpr(1024)  # outputs per program


@triton.jit
def sum_of_parts(own, shares, part_stride, inside, dtype: tl.constexpr, PARTS: tl.constexpr):
    """Return the fp32 sum of PARTS tensors at `own`, `own + part_stride`, .., rounded to `dtype` as if it were stored.

    Each part is multiplied by its share if there are `shares`."""
    total = tl.zeros(inside.shape, tl.float32)
    for part in tl.static_range(PARTS):  # unrolled, so that all loads are in flight together
        value = tl.load(own + part * part_stride, mask=inside, other=0.0).to(tl.float32)
        total += value if shares is None else tl.load(shares + part) * value
    return total.to(dtype).to(tl.float32)


@triton.jit
def _make_kernel(
    own,
    up,
    shares,
    bias,
    out,
    row_stride,
    part_stride,
    num_outputs,
    pieces,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up BLOCK outputs of one row. With `up`, the first sum is the gate of the second."""
    await_inputs(OVERLAP)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_outputs
    if shares is not None:
        shares += row * PARTS
    total = sum_of_parts(own + row * row_stride + at, shares, part_stride, inside, tl.float32, PARTS)
    if bias is not None:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if up is not None:
        beside = sum_of_parts(up + row * row_stride + at, None, part_stride, inside, tl.float32, PARTS)
        total = gate(total, beside, out.dtype.element_ty, None, None)
    tl.store(out + row * num_outputs + at, total.to(out.dtype.element_ty), mask=inside)


def make(parts: Parts, bias: Tensor | None, out: Tensor, up: Parts | None = None) -> Tensor:
    """Return `out[M, N]` with the sum of `parts`, plus a bias, or as the gate of a second sum `up`."""
    num_rows, num_outputs = out.shape
    pieces = ceil_div(num_outputs, BLOCK.value)
    operands = (parts.own, None if up is None else up.own, parts.shares, bias, out)
    counts = (*parts.own.stride()[:2], num_outputs, pieces)
    options = overlap(out.device, num_rows)
    _make_kernel[(num_rows * pieces,)](*operands, *counts, PARTS=parts.own.shape[1], **options)
    return out
