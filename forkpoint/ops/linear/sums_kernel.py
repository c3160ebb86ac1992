"""Inner products, gates and FP8 widening that all kernels with weights share."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu
from forkpoint.ops.launch import start_next
from forkpoint.ops.linear.scaled import BLOCK, ScaledMatrix, UnpackedMatrix
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.parameters import GateLimits
from forkpoint.platforms.table import traits_of

SCALE_WIDTH = tl.constexpr(BLOCK)  # columns per FP8 scale


@triton.jit
def scale_columns(width, BLOCKED: tl.constexpr):
    """Return the number of scales of a row."""
    return (width + SCALE_WIDTH - 1) // SCALE_WIDTH if BLOCKED else 1


@triton.jit
def widened(codes, dtype: tl.constexpr, BITS: tl.constexpr):
    """Convert weights to `dtype`. e4m3 converts exactly.

    With BITS, four codes at a time become bfloat16: sign, exponent and fraction bits are moved to their places, and a
    factor of 2^120 corrects the exponent bias. On devices without 8-bit floats, bytes become float32: codes below 8 are
    subnormals, multiples of 2^-9. A NaN code becomes 480."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int32)
        size = bits & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        return tl.where(bits < 128, value, -value).to(dtype)
    elif BITS:
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
    """Multiply two tiles. If only the weights are FP8, they are widened exactly to x's dtype first."""
    if x_tile.dtype != w_tile.dtype:
        w_tile = widened(w_tile, x_tile.dtype, BITS)
    if TURNED:
        return tl.dot(w_tile, tl.trans(x_tile), input_precision="ieee")
    else:
        return tl.dot(x_tile, tl.trans(w_tile), input_precision="ieee")


@triton.jit
def add_product(
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
    """Return `acc` plus the product of two tiles.

    Scales are applied to the product, not to the weights: one per row of x, per output, or for all outputs."""
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
    elif w_tile.dtype.primitive_bitwidth > x_tile.dtype.primitive_bitwidth:  # fp32 weights and bfloat16 x
        for _ in tl.static_range(3):  # an fp32 number is the sum of three bfloat16 numbers
            part = w_tile.to(tl.bfloat16)
            w_tile -= part.to(tl.float32)
            acc = tl.dot(part, tl.trans(x_tile), acc) if TURNED else tl.dot(x_tile, tl.trans(part), acc)
    elif TURNED:
        acc = tl.dot(widened(w_tile, x_tile.dtype, BITS), tl.trans(x_tile), acc, input_precision="ieee")
    else:
        acc = tl.dot(x_tile, tl.trans(widened(w_tile, x_tile.dtype, BITS)), acc, input_precision="ieee")
    return acc


@triton.jit
def load_scales(scales, at, inside, SCALED: tl.constexpr, SHARED: tl.constexpr):
    """Load the scales of a tile's outputs, or the one scale that they share."""
    if SHARED:
        return tl.load(scales + at)
    elif SCALED:
        return tl.load(scales + at, mask=inside, other=0.0)
    else:
        return 0.0


@triton.jit
def load_tile(at, rows_inside, columns_inside, MASK_ROWS: tl.constexpr, MASK_WIDTH: tl.constexpr):
    """Load a tile of x or of weights with the given row and column masks."""
    if MASK_WIDTH:
        return tl.load(at, mask=rows_inside[:, None] & columns_inside, other=0.0)
    elif MASK_ROWS:
        return tl.load(at, mask=rows_inside[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def gate(acc, up, dtype: tl.constexpr, GATE_LIMIT: tl.constexpr, UP_LIMIT: tl.constexpr):
    """Return `silu(acc) * up` in fp32, of both products rounded as if they were stored.

    GATE_LIMIT and UP_LIMIT clamp acc from above and up on both sides, unless they are None."""
    acc, up = acc.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if GATE_LIMIT is not None:
        acc, up = tl.minimum(acc, GATE_LIMIT), tl.minimum(tl.maximum(up, -UP_LIMIT), UP_LIMIT)
    return silu(acc) * up


@triton.jit
def relu_squared(acc, dtype: tl.constexpr):
    """Return `relu(acc) ** 2` in fp32, of `acc` rounded as if it were stored."""
    up = tl.maximum(acc.to(dtype).to(tl.float32), 0.0)
    return up * up


@triton.jit
def block_columns(WIDTH: tl.constexpr, BLOCKED: tl.constexpr):
    """Return WIDTH column numbers, with one axis for blocks.

    A warp's lanes then read adjacent columns of one matrix row, and each lane needs one scale and few values of x."""
    PART: tl.constexpr = SCALE_WIDTH if BLOCKED else WIDTH
    return tl.arange(0, WIDTH // PART)[:, None] * PART + tl.arange(0, PART)[None, :]


@triton.jit
def block_scales(scales, start, width, WIDTH: tl.constexpr):
    """Load the scales of the blocks of columns `[start, start + WIDTH)`, as a column; 0 from `width` on."""
    block = start // SCALE_WIDTH + tl.arange(0, WIDTH // SCALE_WIDTH)
    return tl.load(scales + block, mask=block * SCALE_WIDTH < width, other=0.0)[:, None]


@triton.jit
def row_tile(
    x,
    weight,
    bias,
    out,
    matrix,
    start,
    num_outputs,
    width,
    scales,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    UP_LIMIT: tl.constexpr,
    SQUARED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute outputs `[start, start + OUTPUTS)` of one row without the matrix units.

    If BLOCKED, all outputs share the scales of their blocks, and WIDTH is a small multiple of SCALE_WIDTH. Otherwise
    each output has its own scale."""
    outputs, columns = tl.arange(0, OUTPUTS), block_columns(WIDTH, BLOCKED)
    inside = outputs < num_outputs - start
    dtype: tl.constexpr = out.dtype.element_ty
    matrix_rows = num_outputs * (2 if GATED else 1)
    weight += (matrix * matrix_rows + start).to(tl.int64) * width
    up_weight = weight + num_outputs.to(tl.int64) * width
    scale_at, up_scale_at = 0, 0
    if SCALE_ROWS:
        above = matrix * tl.cdiv(matrix_rows, SCALE_ROWS)
        scale_at = (above + start // SCALE_ROWS) * scale_columns(width, BLOCKED)
        up_scale_at = (above + (num_outputs + start) // SCALE_ROWS) * scale_columns(width, BLOCKED)
    at = outputs[:, None, None] * width + columns[None, :, :]
    acc = tl.zeros((OUTPUTS, columns.shape[0], columns.shape[1]), tl.float32)
    up = acc
    for k in tl.range(0, width, WIDTH, num_stages=STAGES):
        left = columns < width - k
        valid = inside[:, None, None] & left[None, :, :]
        value = tl.load(x + k + columns, mask=left, other=0.0).to(tl.float32)
        own = value * block_scales(scales + scale_at, k, width, WIDTH) if BLOCKED else value
        acc += widened(tl.load(weight + k + at, mask=valid, other=0.0), tl.float32, False) * own[None, :, :]
        if GATED:
            own = value * block_scales(scales + up_scale_at, k, width, WIDTH) if BLOCKED else value
            up += widened(tl.load(up_weight + k + at, mask=valid, other=0.0), tl.float32, False) * own[None, :, :]
    total = tl.sum(tl.sum(acc, 2), 1)
    total_up = tl.sum(tl.sum(up, 2), 1) if GATED else total
    if SCALE_ROWS and not BLOCKED:
        total *= tl.load(scales + scale_at + outputs, mask=inside, other=0.0)
        if GATED:
            total_up *= tl.load(scales + up_scale_at + outputs, mask=inside, other=0.0)
    start_next(OVERLAP)
    if bias is not None:
        total += tl.load(bias + start + outputs, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = gate(total, total_up, dtype, GATE_LIMIT, UP_LIMIT)
    if SQUARED:
        total = relu_squared(total, dtype)
    tl.store(out + start + outputs, total.to(dtype), mask=inside)


def matrix_parts(weight: UnpackedMatrix) -> tuple[Tensor, Tensor | None]:
    """Return a matrix's elements and, if it is FP8, its scales."""
    return (weight.codes, weight.scales) if isinstance(weight, ScaledMatrix) else (weight, None)


def limit_options(limits: GateLimits | None) -> dict[str, float | None]:
    """Return the kernel options that clamp the halves of a gated activation."""
    gate_limit, up_limit = limits or (None, None)
    return {"GATE_LIMIT": gate_limit, "UP_LIMIT": up_limit}


def scale_options(weight: UnpackedMatrix) -> dict[str, Any]:
    """Return the kernel options that describe a matrix's scales."""
    if not isinstance(weight, ScaledMatrix):
        return {"SCALE_ROWS": 0, "BLOCKED": False}
    return {"SCALE_ROWS": weight.rows, "BLOCKED": weight.by_block}


def by_bits(weight: UnpackedMatrix) -> bool:
    """Return whether kernels with matrix units widen these weights by moving bits."""
    if not isinstance(weight, ScaledMatrix) or weight.dtype != torch.bfloat16:
        return False
    return traits_of(weight.codes.device).multiplies_fp8


def shares_scales(weight: UnpackedMatrix, tile: Tile, gated: bool) -> bool:
    """Return whether the outputs of a program share the scales of their blocks."""
    if not isinstance(weight, ScaledMatrix) or not weight.by_block or weight.rows % tile.outputs:
        return False
    return not gated or weight.shape[-2] % (2 * weight.rows) == 0
