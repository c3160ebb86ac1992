"""Matrix products with weights in Triton; see reference.py for what they compute."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_before, overlap, start_next
from forkpoint.ops.linear.fp8_kernel import Activations
from forkpoint.ops.linear.parts_kernel import make
from forkpoint.ops.linear.scaled import Matrix
from forkpoint.ops.linear.sums_kernel import (
    accumulate,
    by_bits,
    gate,
    matrix_parts,
    row_tile,
    scale_options,
    shares_scales,
)
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.unmade import Parts

BESIDE_OUTPUTS = 2
BESIDE_WIDTH, BESIDE_STAGES = tl.constexpr(1024), tl.constexpr(2)


@triton.jit(do_not_specialize=["num_rows", "splits", "group"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    width,
    x_stride,
    out_stride,
    split_width,
    splits,
    group,
    scales,
    x_scales,
    x_scale_step,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    TOGETHER: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    MASK_OUTPUTS: tl.constexpr,
    MASK_WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    SHARED: tl.constexpr,
    NARROW: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_before(OVERLAP)
    pid = tl.program_id(0)
    split = pid % splits
    pid = pid // splits
    # Programs next to each other share weights while `group` row tiles last, then rows.
    output_tiles = (num_outputs + OUTPUTS - 1) // OUTPUTS
    first = pid // (group * output_tiles) * group
    here = tl.minimum((num_rows + ROWS - 1) // ROWS - first, group)
    place = pid % (group * output_tiles)
    row_start = (first + place % here) * ROWS
    output_start = place // here * OUTPUTS
    start = split * split_width

    rows = (row_start + tl.arange(0, ROWS)).to(tl.int64)
    outputs = output_start + tl.arange(0, OUTPUTS)
    rows_inside, outputs_inside = rows < num_rows, outputs < num_outputs
    acc, up = accumulate(
        x,
        x_stride,
        rows,
        rows_inside,
        x_scales,
        x_scale_step,
        weight,
        0,
        output_start,
        num_outputs,
        start,
        tl.minimum(start + split_width, width),
        width,
        scales,
        OUTPUTS,
        WIDTH,
        TURNED,
        TOGETHER,
        GATED,
        MASK_OUTPUTS,
        MASK_WIDTH,
        SCALE_ROWS,
        BLOCKED,
        SHARED,
        NARROW,
        BITS,
    )
    start_next(OVERLAP)
    inside = rows_inside[:, None] & outputs_inside[None, :]
    line = rows[:, None] * out_stride + outputs[None, :]
    if SPLIT:
        # Sums of [splits, gate and up, num_rows, num_outputs].
        part = num_rows.to(tl.int64) * num_outputs
        sums = out + split * part * (2 if GATED else 1) + line
        tl.store(sums, acc, mask=inside)
        if GATED:
            tl.store(sums + part, up, mask=inside)
    else:
        if bias is not None:
            acc += tl.load(bias + outputs, mask=outputs_inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = gate(acc, up, out.dtype.element_ty)
        tl.store(out + line, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_kernel(
    x,
    weight,
    bias,
    out,
    beside,
    beside_out,
    num_outputs,
    width,
    x_stride,
    output_tiles,
    beside_outputs,
    scales,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    BESIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BESIDE: of one row, and behind its programs come others, of so many outputs each, for a second matrix, which has
    no scales."""
    await_before(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // output_tiles).to(tl.int64)
    if BESIDE:  # noqa: SIM102 (asked alone: triton-ascend compiles what stands behind `BESIDE and ..`)
        if row > 0:
            start = (pid - output_tiles) * BESIDE
            row_tile(
                x, beside, None, beside_out, 0, start, beside_outputs, width, None,
                BESIDE, BESIDE_WIDTH, BESIDE_STAGES, False, False, 0, False, OVERLAP,
            )  # fmt: skip
            return
    row_tile(
        x + row * x_stride, weight, bias, out + row * num_outputs, 0, pid % output_tiles * OUTPUTS, num_outputs, width,
        scales, OUTPUTS, WIDTH, STAGES, GATED, False, SCALE_ROWS, BLOCKED, OVERLAP,
    )  # fmt: skip


def _options(x: Tensor, tile: Tile, at_once: bool = False) -> dict[str, Any]:
    return overlap(x.device, x.shape[0], at_once) if tile.overlaps else {"OVERLAP": False}


def multiply(
    x: Tensor, weight: Matrix, bias: Tensor | None, tile: Tile, gated: bool = False, parts: bool = False
) -> Tensor:
    """`x[M, K] -> y[M, N]` in x's dtype, for rows of any stride; in fp32 if the weight is. With `parts`, and without
    a bias, splits of K may be left as `Parts`.

    With `gated`, `weight[2N, K]` holds gate rows, then up rows, and y is `silu(x gate^T) * (x up^T)`.
    In FP8 a tile's width divides 128, or, where it has 1 row, is a multiple, and `weight.by_one_row(gated)` holds.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_rows, num_outputs, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    if not num_rows:
        return out
    if tile.rows == 1:
        _multiply_row(x, weight, bias, out, tile, gated)
        return out
    split_width = triton.cdiv(triton.cdiv(width, tile.width), tile.splits) * tile.width
    splits = triton.cdiv(width, split_width)
    row_tiles = triton.cdiv(num_rows, tile.rows)
    target = out
    if splits > 1:
        target = torch.empty(splits, 1 + gated, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    codes, scales = matrix_parts(weight)
    given = Activations.of(x, tile.narrows)
    _linear_kernel[(row_tiles * triton.cdiv(num_outputs, tile.outputs) * splits,)](
        given.rows,
        codes,
        bias,
        target,
        num_rows,
        num_outputs,
        width,
        given.rows.stride(0),
        num_outputs,
        split_width,
        splits,
        min(tile.group, row_tiles),
        scales,
        given.scales,
        given.scale_step,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        WIDTH=tile.width,
        TURNED=tile.turned,
        TOGETHER=tile.steps_together(width, split_width),
        GATED=gated,
        SPLIT=splits > 1,
        MASK_OUTPUTS=num_outputs % tile.outputs != 0,
        MASK_WIDTH=width % tile.width != 0,
        **scale_options(weight),
        SHARED=shares_scales(weight, tile, gated),
        NARROW=tile.narrows,
        BITS=by_bits(weight),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_options(x, tile, at_once=scales is None),
    )
    if splits == 1:
        return out
    own, *up = (Parts.of(kind.transpose(0, 1)) for kind in target.unbind(1))
    return own if parts and bias is None and not gated else make(own, bias, out, *up)


def multiply_both(x: Tensor, weight: Matrix, beside: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """`x[1, K] W^T` for two matrices, of which the second is in x's dtype, in one launch; the tile has one row."""
    out, second = (x.new_empty(1, len(codes)) for codes in (matrix_parts(weight)[0], beside))
    _multiply_row(x.contiguous(), weight, None, out, tile, False, (beside, second))
    return out, second


def _multiply_row(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    gated: bool,
    both: tuple[Tensor, Tensor] | None = None,
) -> None:
    beside, second = both or (None, None)
    beside_outputs = 0 if beside is None else len(beside)
    (num_rows, num_outputs), width = out.shape, x.shape[1]
    codes, scales = matrix_parts(weight)
    tiles = triton.cdiv(num_outputs, tile.outputs)
    _row_kernel[(num_rows * tiles + triton.cdiv(beside_outputs, BESIDE_OUTPUTS),)](
        x,
        codes,
        bias,
        out,
        beside,
        second,
        num_outputs,
        width,
        x.stride(0),
        tiles,
        beside_outputs,
        scales,
        OUTPUTS=tile.outputs,
        WIDTH=tile.width,
        STAGES=tile.num_stages,
        GATED=gated,
        **scale_options(weight),
        BESIDE=BESIDE_OUTPUTS if beside_outputs else 0,
        num_warps=tile.num_warps,
        **_options(x, tile, at_once=scales is None),
    )
