"""Routed experts in Triton; see reference.py for what they compute."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_before, await_inputs, overlap, start_next
from forkpoint.ops.linear.kernel import (
    accumulate,
    by_bits,
    gate,
    parts,
    scale_columns,
    scale_options,
)
from forkpoint.ops.linear.scaled import BLOCK as SCALE_BLOCK
from forkpoint.ops.linear.scaled import Matrix, ScaledExperts
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.moe.order_kernel import ExpertOrder, order_by_expert
from forkpoint.ops.moe.reference import PackedExperts

BLOCK = 1024
SCALE_WIDTH = tl.constexpr(SCALE_BLOCK)
PAIR_IN = Tile(1, 8, 512, 4, 3)
PAIR_OUT = Tile(1, 2, 512, 8, 1)


@triton.jit
def relu_squared(acc, dtype: tl.constexpr):
    """`relu(acc) ** 2` in fp32, of `acc` rounded as it would be, were it stored."""
    up = tl.maximum(acc.to(dtype).to(tl.float32), 0.0)
    return up * up


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(
    x,
    weight,
    out,
    pairs,
    tiles,
    num_tiles,
    output_tiles,
    num_outputs,
    width,
    top_k,
    x_stride,
    out_stride,
    scales,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    MASK_OUTPUTS: tl.constexpr,
    MASK_WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_before(OVERLAP)
    pid = tl.program_id(0)
    tile = pid // output_tiles
    output_start = pid % output_tiles * OUTPUTS
    begin = tl.load(tiles + num_tiles + tile)
    end = tl.load(tiles + 2 * num_tiles + tile)
    if begin < end:
        rows = begin + tl.arange(0, ROWS)
        outputs = tl.arange(0, OUTPUTS)
        rows_inside = rows < end
        outputs_inside = outputs < num_outputs - output_start
        pair = tl.load(pairs + rows, mask=rows_inside, other=0)
        # Into the experts: from tokens to places in their order. Out of them: from places to pairs.
        if GATED or SQUARED:
            source = (pair // top_k).to(tl.int64)
            target = rows.to(tl.int64)
        else:
            source = rows.to(tl.int64)
            target = pair.to(tl.int64)
        matrix = tl.load(tiles + tile).to(tl.int64) * (2 if GATED else 1)
        w_at = weight + (matrix * num_outputs + output_start) * width
        scale_at, up_scale_at = 0, 0
        if SCALE_ROWS:
            rows_of_all = num_outputs * (2 if GATED else 1)
            first = tl.load(tiles + tile).to(tl.int64) * tl.cdiv(rows_of_all, SCALE_ROWS)
            here = output_start + outputs
            scale_at = (first + here // SCALE_ROWS) * scale_columns(width, BLOCKED)
            up_scale_at = (first + (num_outputs + here) // SCALE_ROWS) * scale_columns(width, BLOCKED)
        acc, up = accumulate(
            x,
            source * x_stride,
            rows_inside,
            w_at,
            w_at + num_outputs.to(tl.int64) * width,
            outputs_inside,
            0,
            width,
            width,
            scales,
            scale_at,
            up_scale_at,
            ROWS,
            OUTPUTS,
            WIDTH,
            TURNED,
            GATED,
            MASK_OUTPUTS,
            MASK_WIDTH,
            SCALE_ROWS > 0,
            BLOCKED,
            BITS,
        )
        start_next(OVERLAP)
        if GATED:
            acc = gate(acc, up, out.dtype.element_ty)
        if SQUARED:
            acc = relu_squared(acc, out.dtype.element_ty)
        at = target[:, None] * out_stride + output_start + outputs[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=rows_inside[:, None] & outputs_inside[None, :])


@triton.jit
def _combine_kernel(answers, weights, out, size, top_k, pieces, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    token = (pid // pieces).to(tl.int64)
    at = pid % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(top_k):
        pair = token * top_k + choice
        total += tl.load(weights + pair) * tl.load(answers + pair * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _block_scales(scales, row, columns, inside, width, SCALE_ROWS: tl.constexpr, BLOCKED: tl.constexpr):
    """For products without the matrix units: of each of `columns`, for all rows of `row`'s block; 1 if a block is not
    one of SCALE_WIDTH columns."""
    if SCALE_ROWS and BLOCKED:
        at = row // SCALE_ROWS * scale_columns(width, True) + columns // SCALE_WIDTH
        return tl.load(scales + at, mask=inside, other=0.0)
    else:
        return 1.0


@triton.jit
def _row_scales(scales, rows, inside, SCALE_ROWS: tl.constexpr, BLOCKED: tl.constexpr):
    """Of each of `rows`; 1 if rows do not have one each."""
    if SCALE_ROWS and not BLOCKED:
        return tl.load(scales + rows, mask=inside, other=0.0)
    else:
        return 1.0


@triton.jit
def _pair_in_kernel(
    x,
    gate_up,
    ids,
    out,
    x_stride,
    top_k,
    inner,
    width,
    pieces,
    scales,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_before(OVERLAP)
    pid = tl.program_id(0)
    pair = (pid // pieces).to(tl.int64)
    start = pid % pieces * OUTPUTS
    outputs = tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    inside = outputs < inner - start
    matrix = tl.load(ids + pair).to(tl.int64)
    gate_at = gate_up + (matrix * (2 if GATED else 1) * inner + start) * width
    up_at = gate_at + inner.to(tl.int64) * width
    x_at = x + pair // top_k * x_stride
    at = outputs[:, None] * width + columns[None, :]
    row = matrix * (2 if GATED else 1) * inner + start  # of all matrices, one below another; `by_one_row` holds
    acc = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    up = acc
    for k in tl.range(0, width, WIDTH, num_stages=STAGES):
        left = columns < width - k
        valid = inside[:, None] & left[None, :]
        value = tl.load(x_at + k + columns, mask=left, other=0.0).to(tl.float32)
        scaled = value * _block_scales(scales, row, k + columns, left, width, SCALE_ROWS, BLOCKED)
        acc += tl.load(gate_at + k + at, mask=valid, other=0.0).to(tl.float32) * scaled[None, :]
        if GATED:
            scaled = value * _block_scales(scales, inner + row, k + columns, left, width, SCALE_ROWS, BLOCKED)
            up += tl.load(up_at + k + at, mask=valid, other=0.0).to(tl.float32) * scaled[None, :]
    start_next(OVERLAP)
    total = tl.sum(acc, 1) * _row_scales(scales, row + outputs, inside, SCALE_ROWS, BLOCKED)
    if GATED:
        total_up = tl.sum(up, 1) * _row_scales(scales, inner + row + outputs, inside, SCALE_ROWS, BLOCKED)
        result = gate(total, total_up, out.dtype.element_ty)
    else:
        result = relu_squared(total, out.dtype.element_ty)
    tl.store(out + pair * inner + start + outputs, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pair_out_kernel(
    hidden,
    down,
    ids,
    weights,
    out,
    top_k,
    size,
    inner,
    pieces,
    scales,
    CHOICES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_before(OVERLAP)
    pid = tl.program_id(0)
    token = (pid // pieces).to(tl.int64)
    start = pid % pieces * OUTPUTS
    choices = tl.arange(0, CHOICES)
    outputs = tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    chosen = choices < top_k
    pairs = token * top_k + choices
    weight = tl.load(weights + pairs, mask=chosen, other=0.0)
    matrix = tl.load(ids + pairs, mask=chosen, other=0).to(tl.int64)
    rows = (matrix * size + start)[:, None] + outputs[None, :]
    valid = chosen[:, None] & (outputs < size - start)[None, :]
    # All experts at once, so that their loads do not wait for each other.
    acc = tl.zeros((CHOICES, OUTPUTS, WIDTH), tl.float32)
    for k in range(0, inner, WIDTH):
        left = columns < inner - k
        value = tl.load(
            hidden + pairs[:, None] * inner + k + columns[None, :], mask=chosen[:, None] & left[None, :], other=0.0
        )
        value = value.to(tl.float32) * weight[:, None]
        if SCALE_ROWS and BLOCKED:
            first = (matrix * tl.cdiv(size, SCALE_ROWS) + start // SCALE_ROWS) * scale_columns(inner, True)
            at = first[:, None] + ((k + columns) // SCALE_WIDTH)[None, :]
            value *= tl.load(scales + at, mask=chosen[:, None] & left[None, :], other=0.0)
        at = rows[:, :, None] * inner + k + columns[None, None, :]
        tile = tl.load(down + at, mask=valid[:, :, None] & left[None, None, :], other=0.0)
        acc += tile.to(tl.float32) * value[:, None, :]
    start_next(OVERLAP)
    total = tl.sum(tl.sum(acc, 2) * _row_scales(scales, rows, valid, SCALE_ROWS, BLOCKED), 0)
    tl.store(out + token * size + start + outputs, total.to(out.dtype.element_ty), mask=outputs < size - start)


def grouped_experts(
    x: Tensor, packed: PackedExperts | ScaledExperts, weights: Tensor, ids: Tensor, into: Tile, out_of: Tile
) -> Tensor:
    """As `experts`: pairs in the order of their experts, each product in tiles of one expert's rows.

    `into.rows` and `out_of.rows` are the same. A row's bits depend on the tiles alone.
    """
    num_tokens, top_k = ids.shape
    num_experts, size, inner = packed.down.shape
    order = order_by_expert(ids, num_experts, into.rows)
    hidden = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    answers = torch.empty(ids.numel(), size, dtype=x.dtype, device=x.device)
    kind: Literal["gated", "squared"] = "gated" if packed.gated else "squared"
    _grouped_product(x, packed.gate_up, hidden, order, top_k, into, kind)
    _grouped_product(hidden, packed.down, answers, order, top_k, out_of, "plain")
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    pieces = triton.cdiv(size, BLOCK)
    _combine_kernel[(num_tokens * pieces,)](
        answers, weights, out, size, top_k, pieces, BLOCK=BLOCK, **overlap(x.device, num_tokens)
    )
    return out


def _grouped_product(
    x: Tensor,
    weight: Matrix,
    out: Tensor,
    order: ExpertOrder,
    top_k: int,
    tile: Tile,
    kind: Literal["gated", "squared", "plain"],
) -> None:
    codes, scales = parts(weight)
    num_outputs, width = out.shape[1], weight.shape[2]
    num_tiles, output_tiles = order.tiles.shape[1], triton.cdiv(num_outputs, tile.outputs)
    _grouped_kernel[(num_tiles * output_tiles,)](
        x,
        codes,
        out,
        order.pairs,
        order.tiles,
        num_tiles,
        output_tiles,
        num_outputs,
        width,
        top_k,
        x.stride(0),
        out.stride(0),
        scales,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        WIDTH=tile.width,
        TURNED=tile.turned,
        GATED=kind == "gated",
        SQUARED=kind == "squared",
        MASK_OUTPUTS=num_outputs % tile.outputs != 0,
        MASK_WIDTH=width % tile.width != 0,
        **scale_options(weight),
        BITS=by_bits(weight),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap(x.device, x.shape[0]),
    )


def paired_experts(x: Tensor, packed: PackedExperts | ScaledExperts, weights: Tensor, ids: Tensor) -> Tensor:
    """As `experts`, each pair by itself: for so few that hardly two share an expert."""
    num_tokens, top_k = ids.shape
    _, size, inner = packed.down.shape
    hidden = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    pieces = triton.cdiv(inner, PAIR_IN.outputs)
    gate_up, gate_up_scales = parts(packed.gate_up)
    down, down_scales = parts(packed.down)
    _pair_in_kernel[(ids.numel() * pieces,)](
        x,
        gate_up,
        ids,
        hidden,
        x.stride(0),
        top_k,
        inner,
        size,
        pieces,
        gate_up_scales,
        GATED=packed.gated,
        OUTPUTS=PAIR_IN.outputs,
        WIDTH=PAIR_IN.width,
        STAGES=PAIR_IN.num_stages,
        **scale_options(packed.gate_up),
        num_warps=PAIR_IN.num_warps,
        **overlap(x.device, num_tokens),
    )
    pieces = triton.cdiv(size, PAIR_OUT.outputs)
    _pair_out_kernel[(num_tokens * pieces,)](
        hidden,
        down,
        ids,
        weights,
        out,
        top_k,
        size,
        inner,
        pieces,
        down_scales,
        CHOICES=triton.next_power_of_2(top_k),
        OUTPUTS=PAIR_OUT.outputs,
        WIDTH=PAIR_OUT.width,
        **scale_options(packed.down),
        num_warps=PAIR_OUT.num_warps,
        **overlap(x.device, num_tokens),
    )
    return out
