"""Widening an FP8 matrix in Triton, for products of many rows by the vendor's library."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import straight
from forkpoint.ops.linear.scaled import BLOCK, ScaledMatrix
from forkpoint.ops.linear.sums_kernel import SCALE_WIDTH, by_bits, scale_columns, scale_options, widened
from forkpoint.ops.rounding import ceil_div

ROWS = tl.constexpr(64)  # rows per program, which widens the columns of one block


@triton.jit
def _widen_kernel(
    codes,
    scales,
    out,
    num_rows,
    width,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    BITS: tl.constexpr,
    STRAIGHT: tl.constexpr,
):
    pieces = (width + SCALE_WIDTH - 1) // SCALE_WIDTH
    rows = tl.program_id(0) // pieces * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % pieces * SCALE_WIDTH
    columns = start + tl.arange(0, SCALE_WIDTH)
    if STRAIGHT and SCALE_ROWS > 1:  # the rows of a program lie in one block
        scale_at = tl.program_id(0) // pieces * ROWS // SCALE_ROWS * scale_columns(width, BLOCKED)
        scale = tl.load(scales + scale_at + (start // SCALE_WIDTH if BLOCKED else 0)) + tl.zeros((ROWS,), tl.float32)
    else:
        scale_at = rows // SCALE_ROWS * scale_columns(width, BLOCKED) + (start // SCALE_WIDTH if BLOCKED else 0)
        scale = tl.load(scales + scale_at, mask=rows < num_rows, other=0.0)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    value = widened(tl.load(codes + at, mask=inside, other=0.0), tl.float32, BITS) * scale[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def widen(matrix: ScaledMatrix) -> Tensor:
    """Return the widened matrix `[N, K]`, as `ScaledMatrix.dense` does."""
    num_rows, width = matrix.shape
    out = torch.empty(num_rows, width, dtype=matrix.dtype, device=matrix.codes.device)
    programs = ceil_div(num_rows, ROWS.value) * ceil_div(width, BLOCK)
    options = {**scale_options(matrix), "BITS": by_bits(matrix), **straight(out.device)}
    _widen_kernel[(programs,)](matrix.codes, matrix.scales, out, num_rows, width, **options)
    return out
