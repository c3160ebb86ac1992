"""Gated products of a few dozen rows in Triton, 96 outputs of each half to a program.

The weights are the whole cost there. With 96 outputs (128 + 64 rows of weights, where one tile would have a power of
two) a model's 12,288 make 128 programs: one for each processor of a Hopper GPU but four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.linear.sums_kernel import gate
from forkpoint.ops.linear.tiles import GatedTile


@triton.jit
def _store_gated(acc, out, rows, inside, start, num_outputs, out_stride, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Gate and store `acc[ROWS, 2 * OUTPUTS]`: gates, then ups, of the outputs from `start` on."""
    left, up = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, OUTPUTS)), (0, 2, 1)))
    outputs = start + tl.arange(0, OUTPUTS)
    value = gate(left, up, out.dtype.element_ty).to(out.dtype.element_ty)
    at = rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    tl.store(out + at, value, mask=inside[:, None] & (outputs < num_outputs)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    x,
    weight,
    out,
    num_rows,
    num_outputs,
    width,
    x_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    MASK_WIDTH: tl.constexpr,
):
    row_tiles = (num_rows + ROWS - 1) // ROWS
    rows = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) // row_tiles * (WIDE + NARROW)
    middle = start + WIDE
    inside = rows < num_rows
    columns = tl.arange(0, WIDTH)
    # Gates, then ups; outputs behind the last one are read as the last one.
    wide, narrow = tl.arange(0, 2 * WIDE), tl.arange(0, 2 * NARROW)
    wide_row = tl.minimum(start + wide % WIDE, num_outputs - 1) + wide // WIDE * num_outputs
    narrow_row = tl.minimum(middle + narrow % NARROW, num_outputs - 1) + narrow // NARROW * num_outputs
    x_at = rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    wide_at = wide_row.to(tl.int64)[:, None] * width + columns[None, :]
    narrow_at = narrow_row.to(tl.int64)[:, None] * width + columns[None, :]
    acc = tl.zeros((ROWS, 2 * WIDE), tl.float32)
    rest = tl.zeros((ROWS, 2 * NARROW), tl.float32)
    for k in range(0, width, WIDTH):
        if MASK_WIDTH:
            left = (columns < width - k)[None, :]
            x_tile = tl.load(x + x_at, mask=inside[:, None] & left, other=0.0)
            acc = tl.dot(x_tile, tl.trans(tl.load(weight + wide_at, mask=left, other=0.0)), acc)
            rest = tl.dot(x_tile, tl.trans(tl.load(weight + narrow_at, mask=left, other=0.0)), rest)
        else:
            x_tile = tl.load(x + x_at, mask=inside[:, None], other=0.0)
            acc = tl.dot(x_tile, tl.trans(tl.load(weight + wide_at)), acc)
            rest = tl.dot(x_tile, tl.trans(tl.load(weight + narrow_at)), rest)
        x += WIDTH
        weight += WIDTH
    _store_gated(acc, out, rows, inside, start, num_outputs, num_outputs, ROWS, WIDE)
    _store_gated(rest, out, rows, inside, middle, num_outputs, num_outputs, ROWS, NARROW)


def multiply_gated(x: Tensor, weight: Tensor, tile: GatedTile) -> Tensor:
    """`silu(x gate^T) * (x up^T)` for `x[M, K]` of any row stride and `weight[2N, K]`, gate rows first -> `[M, N]`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // 2
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.wide + tile.narrow)
    if programs:
        _gated_kernel[(programs,)](
            x,
            weight,
            out,
            num_rows,
            num_outputs,
            width,
            x.stride(0),
            ROWS=tile.rows,
            WIDTH=tile.width,
            WIDE=tile.wide,
            NARROW=tile.narrow,
            MASK_WIDTH=width % tile.width != 0,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out
