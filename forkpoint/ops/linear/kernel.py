"""Matrix products with weights in Triton; see reference.py for what they compute."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu
from forkpoint.ops.launch import await_before, await_inputs, overlap, start_next
from forkpoint.ops.linear.fp8_kernel import Activations
from forkpoint.ops.linear.scaled import BLOCK as SCALE_BLOCK
from forkpoint.ops.linear.scaled import Matrix, ScaledMatrix
from forkpoint.ops.linear.tiles import Tile
from forkpoint.platforms.table import traits_of

BLOCK = 1024  # outputs whose splits one program adds
SCALE_WIDTH = tl.constexpr(SCALE_BLOCK)  # columns of a block, of which each has a scale


@triton.jit
def scale_columns(width, BLOCKED: tl.constexpr):
    """Scales of a row."""
    return (width + SCALE_WIDTH - 1) // SCALE_WIDTH if BLOCKED else 1


@triton.jit
def widened(codes, dtype: tl.constexpr, BITS: tl.constexpr):
    """Weights in `dtype`; e4m3 exactly. With BITS four at a time by way of bfloat16: sign, exponent and fraction are
    put where it has them, and 2^120 makes up for its other bias."""
    if BITS:
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, rest, by;
            mov.b32 by, 0x7B807B80;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.b32 rest, low, 4;
            and.b32 rest, rest, 0x07f007f0;
            lop3.b32 low, low, 0x80008000, rest, 0xEA;
            mul.rn.bf16x2 $0, low, by;
            shr.b32 rest, high, 4;
            and.b32 rest, rest, 0x07f007f0;
            lop3.b32 high, high, 0x80008000, rest, 0xEA;
            mul.rn.bf16x2 $1, high, by;
            }
            """,
            "=r,=r,r",
            [codes.to(tl.int8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
        return wide.to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def _product(x_tile, w_tile, TURNED: tl.constexpr, BITS: tl.constexpr):
    """Of two tiles, of which both may be in FP8; it alone is exact in x's dtype."""
    if x_tile.dtype != w_tile.dtype:
        w_tile = widened(w_tile, x_tile.dtype, BITS)
    if TURNED:
        return tl.dot(w_tile, tl.trans(x_tile), input_precision="ieee")
    else:
        return tl.dot(x_tile, tl.trans(w_tile), input_precision="ieee")


@triton.jit
def _add_product(
    acc,
    x_tile,
    x_scale,
    w_tile,
    scale,
    TURNED: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED: tl.constexpr,
    NARROW: tl.constexpr,
    BITS: tl.constexpr,
):
    """`acc` and the product of two tiles. Sums are scaled, not weights: by the scale of each row of x, of each output
    or of all, as there are any."""
    if NARROW or SCALED:
        part = _product(x_tile, w_tile, TURNED, BITS)
        if SHARED:
            x_scale *= scale
        if NARROW:
            part *= x_scale[None, :] if TURNED else x_scale[:, None]
        elif SHARED:
            part *= scale
        if SCALED and not SHARED:
            part *= scale[:, None] if TURNED else scale[None, :]
        acc += part
    elif TURNED:
        acc = tl.dot(widened(w_tile, x_tile.dtype, BITS), tl.trans(x_tile), acc, input_precision="ieee")
    else:
        acc = tl.dot(x_tile, tl.trans(widened(w_tile, x_tile.dtype, BITS)), acc, input_precision="ieee")
    return acc


@triton.jit
def _scales(scales, at, inside, SCALED: tl.constexpr, SHARED: tl.constexpr):
    """Of a tile's outputs, or the one that they share."""
    if SHARED:
        return tl.load(scales + at)
    elif SCALED:
        return tl.load(scales + at, mask=inside, other=0.0)
    else:
        return 0.0


@triton.jit
def accumulate(
    x,
    x_offsets,
    rows_inside,
    x_scales,
    x_scale_at,
    x_scale_step,
    weight,
    up_weight,
    outputs_inside,
    start,
    end,
    width,
    scales,
    scale_at,
    up_scale_at,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    TOGETHER: tl.constexpr,
    GATED: tl.constexpr,
    MASK_OUTPUTS: tl.constexpr,
    MASK_WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKED: tl.constexpr,
    SHARED: tl.constexpr,
    NARROW: tl.constexpr,
    BITS: tl.constexpr,
):
    """fp32 sums over `[start, end)` of K, `[ROWS, OUTPUTS]`, of x's rows at `x_offsets` with the rows of `weight`, and,
    if GATED, of `up_weight`. The steps of K are the same whatever the tile; float32 is not cut to tf32.

    With SCALED weights are in FP8, and the scales of the outputs' rows start at `scale_at`: one for each SCALE_WIDTH
    columns if BLOCKED, else one. With SHARED all outputs have the same, and `scale_at` is one place. If NARROW so is x,
    with a scale for each SCALE_WIDTH columns of a row, `x_scale_step` apart. A step of K lies in a block; TOGETHER of
    them are loaded as one."""
    outputs = tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    x_at = x_offsets[:, None] + columns[None, :]
    w_at = outputs[:, None] * width + columns[None, :]
    x += start
    weight += start
    up_weight += start
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32) if TURNED else tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = acc
    for first in range(start, end, WIDTH * TOGETHER):
        for step in tl.static_range(TOGETHER):
            k = first + step * WIDTH
            block = k // SCALE_WIDTH
            scale = _scales(scales, scale_at + block, outputs_inside, BLOCKED, SHARED)
            x_scale = 0.0
            if NARROW:
                x_scale = tl.load(x_scales + x_scale_at + block * x_scale_step, mask=rows_inside, other=0.0)
            if MASK_WIDTH:
                inside = (columns < end - k)[None, :]
                x_tile = tl.load(x + x_at, mask=rows_inside[:, None] & inside, other=0.0)
                w_tile = tl.load(weight + w_at, mask=outputs_inside[:, None] & inside, other=0.0)
            else:
                x_tile = tl.load(x + x_at, mask=rows_inside[:, None], other=0.0)
                if MASK_OUTPUTS:
                    w_tile = tl.load(weight + w_at, mask=outputs_inside[:, None], other=0.0)
                else:
                    w_tile = tl.load(weight + w_at)
            acc = _add_product(acc, x_tile, x_scale, w_tile, scale, TURNED, BLOCKED, SHARED, NARROW, BITS)
            if GATED:
                if MASK_WIDTH:
                    u_tile = tl.load(up_weight + w_at, mask=outputs_inside[:, None] & inside, other=0.0)
                elif MASK_OUTPUTS:
                    u_tile = tl.load(up_weight + w_at, mask=outputs_inside[:, None], other=0.0)
                else:
                    u_tile = tl.load(up_weight + w_at)
                up_scale = _scales(scales, up_scale_at + block, outputs_inside, BLOCKED, SHARED)
                up = _add_product(up, x_tile, x_scale, u_tile, up_scale, TURNED, BLOCKED, SHARED, NARROW, BITS)
            x += WIDTH
            weight += WIDTH
            up_weight += WIDTH
    if TURNED:
        acc = tl.trans(acc)
        up = tl.trans(up) if GATED else acc
    if SCALED and not BLOCKED:
        acc *= tl.load(scales + scale_at, mask=outputs_inside, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scales + up_scale_at, mask=outputs_inside, other=0.0)[None, :]
    return acc, up


@triton.jit
def gate(acc, up, dtype: tl.constexpr):
    """`silu(acc) * up` in fp32, rounded before as the two products would be, were they stored."""
    return silu(acc.to(dtype).to(tl.float32)) * up.to(dtype).to(tl.float32)


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
    BIAS: tl.constexpr,
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

    rows = row_start + tl.arange(0, ROWS)
    outputs = output_start + tl.arange(0, OUTPUTS)
    rows_inside = rows < num_rows
    outputs_inside = outputs < num_outputs
    w_at = weight + output_start.to(tl.int64) * width
    scale_at, up_scale_at = 0, 0
    if SCALE_ROWS:
        scaled_rows = output_start if SHARED else outputs
        scale_at = scaled_rows // SCALE_ROWS * scale_columns(width, BLOCKED)
        up_scale_at = (num_outputs + scaled_rows) // SCALE_ROWS * scale_columns(width, BLOCKED)
    acc, up = accumulate(
        x,
        rows.to(tl.int64) * x_stride,
        rows_inside,
        x_scales,
        rows,
        x_scale_step,
        w_at,
        w_at + num_outputs.to(tl.int64) * width,
        outputs_inside,
        start,
        tl.minimum(start + split_width, width),
        width,
        scales,
        scale_at,
        up_scale_at,
        ROWS,
        OUTPUTS,
        WIDTH,
        TURNED,
        TOGETHER,
        GATED,
        MASK_OUTPUTS,
        MASK_WIDTH,
        SCALE_ROWS > 0,
        BLOCKED,
        SHARED,
        NARROW,
        BITS,
    )
    start_next(OVERLAP)
    inside = rows_inside[:, None] & outputs_inside[None, :]
    line = rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    if SPLIT:
        # Sums of [splits, gate and up, num_rows, num_outputs].
        part = num_rows.to(tl.int64) * num_outputs
        sums = out + split * part * (2 if GATED else 1) + line
        tl.store(sums, acc, mask=inside)
        if GATED:
            tl.store(sums + part, up, mask=inside)
    else:
        if BIAS:
            acc += tl.load(bias + outputs, mask=outputs_inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = gate(acc, up, out.dtype.element_ty)
        tl.store(out + line, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_sums(
    x,
    weight,
    up_weight,
    inside,
    width,
    scales,
    scale_at,
    up_scale_at,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """As `accumulate`, of one row of x, without the matrix units: `[OUTPUTS]`. All outputs share the scales of their
    blocks, and WIDTH is SCALE_WIDTH, if BLOCKED; else outputs have one each."""
    outputs = tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    at = outputs[:, None] * width + columns[None, :]
    acc = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    up = acc
    for k in tl.range(0, width, WIDTH, num_stages=STAGES):
        left = columns < width - k
        valid = inside[:, None] & left[None, :]
        value = tl.load(x + k + columns, mask=left, other=0.0).to(tl.float32)
        own = value * tl.load(scales + scale_at + k // WIDTH) if BLOCKED else value
        acc += tl.load(weight + k + at, mask=valid, other=0.0).to(tl.float32) * own[None, :]
        if GATED:
            own = value * tl.load(scales + up_scale_at + k // WIDTH) if BLOCKED else value
            up += tl.load(up_weight + k + at, mask=valid, other=0.0).to(tl.float32) * own[None, :]
    total = tl.sum(acc, 1)
    total_up = tl.sum(up, 1) if GATED else total
    if SCALED and not BLOCKED:
        total *= tl.load(scales + scale_at + outputs, mask=inside, other=0.0)
        if GATED:
            total_up *= tl.load(scales + up_scale_at + outputs, mask=inside, other=0.0)
    return total, total_up


@triton.jit
def _row_kernel(
    x,
    weight,
    bias,
    out,
    num_outputs,
    width,
    scales,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_before(OVERLAP)
    start = tl.program_id(0) * OUTPUTS
    outputs = tl.arange(0, OUTPUTS)
    inside = outputs < num_outputs - start
    w_at = weight + start.to(tl.int64) * width
    scale_at, up_scale_at = 0, 0
    if SCALE_ROWS:
        scale_at = start // SCALE_ROWS * scale_columns(width, BLOCKED)
        up_scale_at = (num_outputs + start) // SCALE_ROWS * scale_columns(width, BLOCKED)
    total, up = row_sums(
        x,
        w_at,
        w_at + num_outputs.to(tl.int64) * width,
        inside,
        width,
        scales,
        scale_at,
        up_scale_at,
        OUTPUTS,
        WIDTH,
        STAGES,
        GATED,
        SCALE_ROWS > 0,
        BLOCKED,
    )
    start_next(OVERLAP)
    if BIAS:
        total += tl.load(bias + start + outputs, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = gate(total, up, out.dtype.element_ty)
    tl.store(out + start + outputs, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "splits", "pieces"])
def _add_splits_kernel(
    sums,
    bias,
    out,
    num_rows,
    num_outputs,
    splits,
    pieces,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // pieces).to(tl.int64) * num_outputs
    at = pid % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_outputs
    part = num_rows.to(tl.int64) * num_outputs
    total = tl.zeros((BLOCK,), tl.float32)
    up = total
    for _ in range(splits):
        total += tl.load(sums + row + at, mask=inside, other=0.0)
        sums += part
        if GATED:
            up += tl.load(sums + row + at, mask=inside, other=0.0)
            sums += part
    if BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = gate(total, up, out.dtype.element_ty)
    tl.store(out + row + at, total.to(out.dtype.element_ty), mask=inside)


def _options(x: Tensor, tile: Tile, at_once: bool = False) -> dict[str, Any]:
    return overlap(x.device, x.shape[0], at_once) if tile.overlaps else {"OVERLAP": False}


def parts(weight: Matrix) -> tuple[Tensor, Tensor | None]:
    """The elements, and, in FP8, the scales."""
    return (weight.codes, weight.scales) if isinstance(weight, ScaledMatrix) else (weight, None)


def scale_options(weight: Matrix) -> dict[str, Any]:
    """What kernels want to know of a matrix's scales."""
    if not isinstance(weight, ScaledMatrix):
        return {"SCALE_ROWS": 0, "BLOCKED": False}
    return {"SCALE_ROWS": weight.rows, "BLOCKED": weight.by_block}


def by_bits(weight: Matrix) -> bool:
    """Whether kernels that put weights into the matrix units widen them by their bits."""
    if not isinstance(weight, ScaledMatrix) or weight.dtype != torch.bfloat16:
        return False
    return traits_of(weight.codes.device).multiplies_fp8


def shares_scales(weight: Matrix, tile: Tile, gated: bool) -> bool:
    """Whether the outputs of a program share the scales of their blocks."""
    if not isinstance(weight, ScaledMatrix) or not weight.by_block or weight.rows % tile.outputs:
        return False
    return not gated or weight.shape[-2] % (2 * weight.rows) == 0


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None, tile: Tile, gated: bool = False) -> Tensor:
    """`x[M, K] -> y[M, N]` in x's dtype, for rows of any stride.

    With `gated`, `weight[2N, K]` holds gate rows, then up rows, and y is `silu(x gate^T) * (x up^T)`.
    In FP8 a tile's width divides 128; where it has 1 row, it is 128, and `weight.by_one_row(gated)` holds.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    if tile.rows == 1:
        assert num_rows == 1
        _multiply_row(x, weight, bias, out, tile, gated)
        return out
    split_width = triton.cdiv(triton.cdiv(width, tile.width), tile.splits) * tile.width
    splits = triton.cdiv(width, split_width)
    row_tiles = triton.cdiv(num_rows, tile.rows)
    target = out
    if splits > 1:
        target = torch.empty(splits, 1 + gated, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    codes, scales = parts(weight)
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
        BIAS=bias is not None,
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
    if splits > 1:
        _add_splits(target, bias, out, tile)
    return out


def _add_splits(sums: Tensor, bias: Tensor | None, out: Tensor, tile: Tile) -> None:
    """`sums[splits, 1 or 2, M, N]` in their order -> `out[M, N]`; of two sums the second goes up beside a gate."""
    splits, kinds, num_rows, num_outputs = sums.shape
    pieces = triton.cdiv(num_outputs, BLOCK)
    _add_splits_kernel[(num_rows * pieces,)](
        sums,
        bias,
        out,
        num_rows,
        num_outputs,
        splits,
        pieces,
        GATED=kinds == 2,
        BIAS=bias is not None,
        BLOCK=BLOCK,
        **_options(out, tile),
    )


def _multiply_row(x: Tensor, weight: Matrix, bias: Tensor | None, out: Tensor, tile: Tile, gated: bool) -> None:
    num_outputs, width = out.shape[1], x.shape[1]
    codes, scales = parts(weight)
    _row_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x,
        codes,
        bias,
        out,
        num_outputs,
        width,
        scales,
        OUTPUTS=tile.outputs,
        WIDTH=tile.width,
        STAGES=tile.num_stages,
        GATED=gated,
        BIAS=bias is not None,
        **scale_options(weight),
        num_warps=tile.num_warps,
        **_options(x, tile, at_once=scales is None),
    )
