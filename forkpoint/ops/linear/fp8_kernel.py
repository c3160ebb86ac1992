"""Products of which both sides are in FP8, by the vendor's library: the fastest for many rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.linear.scaled import BLOCK, CODES, FP8_MAX, LEAST_AMAX, ScaledMatrix

ROWS = 64  # to a multiple of which rows are filled up: the library is slower with 32 than with 64
NARROW_ROWS = 16  # of one program
_MAX, _LEAST = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_AMAX)


@triton.jit
def _narrow_kernel(x, codes, scales, num_rows, padded_rows, width, x_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """`ROWS x WIDTH` elements; a row's have one scale. Rows from `num_rows` on are zeros."""
    pieces = tl.cdiv(width, WIDTH)
    rows = tl.program_id(0) // pieces * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(0) % pieces
    columns = piece * WIDTH + tl.arange(0, WIDTH)
    inside, row = (columns < width)[None, :], rows.to(tl.int64)[:, None]
    there = (rows < num_rows)[:, None] & inside
    value = tl.load(x + row * x_stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), _LEAST) / _MAX
    tl.store(codes + row * width + columns[None, :], (value / scale[:, None]).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + piece.to(tl.int64) * padded_rows + rows, scale)


def narrow(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scales of `x[M, K]`, a scale for each row and `columns` of it, with M rounded up to ROWS:
    `[M', K]`, `[M', K / columns]`, the latter column after column."""
    num_rows, width = x.shape
    padded, pieces = triton.cdiv(num_rows, ROWS) * ROWS, triton.cdiv(width, columns)
    codes = torch.empty(padded, width, dtype=CODES, device=x.device)
    scales = torch.empty(pieces, padded, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    rows = NARROW_ROWS if block == BLOCK else 1
    _narrow_kernel[(padded // rows * pieces,)](
        x, codes, scales, num_rows, padded, width, x.stride(0), ROWS=rows, WIDTH=block, num_warps=4
    )
    return codes, scales.t()


def library_scales(weight: ScaledMatrix) -> Tensor | None:
    """The scales of `[N, K]` as the library wants them; None: it has no product for their blocks."""
    num_outputs, width = weight.shape
    if num_outputs % 16 or width % BLOCK or weight.dtype != torch.bfloat16:
        return None
    if not weight.by_block:
        return weight.scales.view(1, -1) if weight.rows == 1 else None
    if weight.rows != BLOCK or weight.columns != BLOCK:
        return None
    # Column after column, each of a length that is a multiple of four.
    rows, columns = weight.scales.shape
    padded = weight.scales.new_zeros(rows, triton.cdiv(columns, 4) * 4)
    padded[:, :columns] = weight.scales
    return padded.t()


def multiply_fp8(x: Tensor, weight: ScaledMatrix, scales: Tensor, bias: Tensor | None) -> Tensor:
    """`x[M, K] -> y[M, N]` in bfloat16; `scales` are `library_scales(weight)`. x is rounded to FP8, with a scale for
    each row, and each 128 columns of it where weights have one for each block."""
    kinds = F.ScalingType
    if weight.by_block:
        columns, recipes = BLOCK, (kinds.BlockWise1x128, kinds.BlockWise128x128)
    else:
        columns, recipes = x.shape[1], (kinds.RowWise, kinds.RowWise)
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, x_scales = narrow(x, columns)
    product: Any = F.scaled_mm
    y: Tensor = product(codes, weight.codes.t(), x_scales, recipes[0], scales, recipes[1], output_dtype=x.dtype)
    y = y[: x.shape[0]]
    return y if bias is None else y + bias
