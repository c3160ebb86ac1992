"""UnpackedMatrix products with weights in Triton. reference.py has the formulas, tiles.py the choice of tiles.

`product_kernel` computes tiles with the matrix units. `_row_kernel` computes single rows without them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_before, overlap, start_next
from forkpoint.ops.linear.fp8_kernel import Activations, narrowed
from forkpoint.ops.linear.parts_kernel import make
from forkpoint.ops.linear.scaled import ScaledMatrix, UnpackedMatrix
from forkpoint.ops.linear.sums_kernel import (
    SCALE_WIDTH,
    add_product,
    by_bits,
    gate,
    limit_options,
    load_scales,
    load_tile,
    matrix_parts,
    relu_squared,
    row_tile,
    scale_columns,
    scale_options,
    shares_scales,
)
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.parameters import GateLimits
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.ops.unmade import Parts

SPLIT_ROWS = 1024  # rows whose partial sums are in memory together at most
MOST_AT_ONCE = 40_000_000  # elements of an FP8 matrix with which one row lets the next launch start at once
BESIDE_OUTPUTS, BESIDE_WIDTH, BESIDE_STAGES = tl.constexpr(2), tl.constexpr(1024), tl.constexpr(2)


@triton.jit
def _own_pairs(ids, expert, num_pairs, group, ROWS: tl.constexpr, CHOICES: tl.constexpr):
    """Return each token's pair with the expert, -1 for tokens without one."""
    choices = tl.arange(0, CHOICES)[None, :]
    every = tl.arange(0, ROWS)[:, None] * group + choices
    chosen = tl.load(ids + every, mask=(choices < group) & (every < num_pairs), other=-1)
    return tl.max(tl.where(chosen == expert, every, -1), 1)


@triton.jit(do_not_specialize=["num_rows", "splits", "group"])
def product_kernel(
    x,
    weight,
    bias,
    out,
    pairs,
    tiles,
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
    out_scales,
    out_scale_step,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    GATED: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    UP_LIMIT: tl.constexpr,
    SQUARED: tl.constexpr,
    SPLIT: tl.constexpr,
    MASK_OUTPUTS: tl.constexpr,
    MASK_WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    SHARED: tl.constexpr,
    BITS: tl.constexpr,
    CHOICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one tile of the product with a matrix, or with an expert's matrix if `pairs` is given.

    `tiles` and `pairs` come from `ExpertOrder`. The product into experts reads tokens, of `group` pairs each, and
    writes places in the order of pairs. The product out of experts reads places and writes pairs. With `pairs` alone,
    `pairs` holds the experts of at most ROWS tokens, CHOICES is at least `group`, and places are pairs. If GATED, the
    weight has a second half of outputs, and `silu(gate) * up` is stored (limits: see `gate`).

    With SCALE_ROWS, weights are FP8 and that many rows share scales: one per SCALE_WIDTH columns if BLOCKED, else one.
    With SHARED, all outputs of a tile share their scales. x may also be FP8, with one scale per SCALE_WIDTH columns of
    a row, `x_scale_step` apart. A step of K lies within one block."""
    await_before(OVERLAP)
    pid, start, end = tl.program_id(0), 0, width
    output_tiles = tl.cdiv(num_outputs, OUTPUTS)
    if tiles is None and pairs is not None:
        pair, output_start = pid // output_tiles, pid % output_tiles * OUTPUTS
        matrix = tl.load(pairs + pair).to(tl.int64)
        own = _own_pairs(pairs, matrix, num_rows, group, ROWS, CHOICES)
        # The first pair of an expert has the programs that serve all of them.
        if tl.min(tl.where(own < 0, num_rows, own), 0) < pair:
            return
        rows_inside = own >= 0
        rows = own.to(tl.int64)
        targets = rows
        if GATED or SQUARED:
            rows = tl.arange(0, ROWS).to(tl.int64)
    elif tiles is not None:
        tile, output_start = pid // output_tiles, pid % output_tiles * OUTPUTS
        begin, behind = tl.load(tiles + num_rows + tile), tl.load(tiles + 2 * num_rows + tile)
        if begin >= behind:
            return
        matrix = tl.load(tiles + tile).to(tl.int64)
        places = begin + tl.arange(0, ROWS)
        rows_inside = places < behind
        pair = tl.load(pairs + places, mask=rows_inside, other=0)
        rows, targets = places.to(tl.int64), pair.to(tl.int64)
        if GATED or SQUARED:
            rows, targets = (pair // group).to(tl.int64), places.to(tl.int64)
    else:
        split, pid = pid % splits, pid // splits
        start = split * split_width
        end = tl.minimum(start + split_width, width)
        # Adjacent programs share weights for `group` row tiles, then rows.
        first = pid // (group * output_tiles) * group
        here = tl.minimum(tl.cdiv(num_rows, ROWS) - first, group)
        place = pid % (group * output_tiles)
        matrix, output_start = 0, place // here * OUTPUTS
        rows = ((first + place % here) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        targets, rows_inside = rows, rows < num_rows
    outputs, columns = tl.arange(0, OUTPUTS), tl.arange(0, WIDTH)
    outputs_inside = outputs < num_outputs - output_start
    NARROW: tl.constexpr = x_scales is not None
    matrix_rows = num_outputs * (2 if GATED else 1)
    scale_at, up_scale_at = 0, 0
    if SCALE_ROWS:
        above = matrix * tl.cdiv(matrix_rows, SCALE_ROWS)
        scaled = output_start if SHARED else output_start + outputs
        scale_at = (above + scaled // SCALE_ROWS) * scale_columns(width, BLOCKED)
        up_scale_at = (above + (num_outputs + scaled) // SCALE_ROWS) * scale_columns(width, BLOCKED)
    x_at = (rows * x_stride)[:, None] + columns[None, :]
    w_at = outputs[:, None] * width + columns[None, :]
    x += start
    weight += (matrix * matrix_rows + output_start).to(tl.int64) * width + start
    up_weight = weight + num_outputs.to(tl.int64) * width
    # The steps of K do not depend on the tile, and float32 is not truncated to TF32.
    acc = tl.zeros((OUTPUTS, ROWS) if TURNED else (ROWS, OUTPUTS), tl.float32)
    up = acc
    for k in range(start, end, WIDTH):
        block = k // SCALE_WIDTH
        left = (columns < end - k)[None, :]
        scale = load_scales(scales, scale_at + block, outputs_inside, BLOCKED, SHARED)
        x_scale = 0.0
        if NARROW:
            x_scale = tl.load(x_scales + rows + block * x_scale_step, mask=rows_inside, other=0.0)
        x_tile = load_tile(x + x_at, rows_inside, left, True, MASK_WIDTH)
        w_tile = load_tile(weight + w_at, outputs_inside, left, MASK_OUTPUTS, MASK_WIDTH)
        acc = add_product(acc, x_tile, x_scale, w_tile, scale, TURNED, BLOCKED, SHARED, NARROW, BITS)
        if GATED:
            u_tile = load_tile(up_weight + w_at, outputs_inside, left, MASK_OUTPUTS, MASK_WIDTH)
            up_scale = load_scales(scales, up_scale_at + block, outputs_inside, BLOCKED, SHARED)
            up = add_product(up, x_tile, x_scale, u_tile, up_scale, TURNED, BLOCKED, SHARED, NARROW, BITS)
        x += WIDTH
        weight += WIDTH
        up_weight += WIDTH
    if TURNED:
        acc = tl.trans(acc)
        up = tl.trans(up) if GATED else acc
    if SCALE_ROWS and not BLOCKED:
        acc *= tl.load(scales + scale_at, mask=outputs_inside, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scales + up_scale_at, mask=outputs_inside, other=0.0)[None, :]
    start_next(OVERLAP)
    outputs += output_start
    inside = rows_inside[:, None] & outputs_inside[None, :]
    line = targets[:, None] * out_stride + outputs[None, :]
    if SPLIT:
        # Partial sums `[splits, gate and up, num_rows, num_outputs]`.
        part = num_rows.to(tl.int64) * num_outputs
        sums = out + split * part * (2 if GATED else 1) + line
        tl.store(sums, acc, mask=inside)
        if GATED:
            tl.store(sums + part, up, mask=inside)
    else:
        dtype: tl.constexpr = out.dtype.element_ty if out_scales is None else tl.bfloat16
        if bias is not None:
            acc += tl.load(bias + outputs, mask=outputs_inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = gate(acc, up, dtype, GATE_LIMIT, UP_LIMIT)
        if SQUARED:
            acc = relu_squared(acc, dtype)
        if out_scales is not None:  # here OUTPUTS equals SCALE_WIDTH
            acc, scale = narrowed(acc)
            tl.store(out_scales + output_start // SCALE_WIDTH * out_scale_step + targets, scale, mask=rows_inside)
        tl.store(out + line, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_kernel(
    x,
    weight,
    bias,
    out,
    ids,
    beside,
    beside_out,
    num_outputs,
    width,
    x_stride,
    output_tiles,
    group,
    beside_outputs,
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
    """Multiply single rows without the matrix units.

    With `ids`, a row is a pair of a token and an expert, and `group` pairs share a row of x. With `beside` there is one
    row, and further programs, of BESIDE_OUTPUTS outputs each, multiply it by a second matrix without scales."""
    await_before(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // output_tiles).to(tl.int64)
    if beside is not None:  # noqa: SIM102 (asked alone: triton-ascend compiles what stands behind `.. and`)
        if row > 0:
            start = (pid - output_tiles) * BESIDE_OUTPUTS
            row_tile(
                x, beside, None, beside_out, 0, start, beside_outputs, width, None,
                BESIDE_OUTPUTS, BESIDE_WIDTH, BESIDE_STAGES, False, None, None, False, 0, False, OVERLAP,
            )  # fmt: skip
            return
    source, matrix = row, 0
    if ids is not None:
        source, matrix = row // group, tl.load(ids + row).to(tl.int64)
    row_tile(
        x + source * x_stride, weight, bias, out + row * num_outputs, matrix, pid % output_tiles * OUTPUTS, num_outputs,
        width, scales, OUTPUTS, WIDTH, STAGES, GATED, GATE_LIMIT, UP_LIMIT, SQUARED, SCALE_ROWS, BLOCKED, OVERLAP,
    )  # fmt: skip


def _options(x: Tensor, tile: Tile, weight: UnpackedMatrix) -> dict[str, Any]:
    is_small = tile.rows == 1 and weight.shape.numel() <= MOST_AT_ONCE
    at_once = is_small or not isinstance(weight, ScaledMatrix)
    return overlap(x.device, x.shape[0], at_once) if tile.overlaps else {"OVERLAP": False}


def multiply(
    x: Tensor, weight: UnpackedMatrix, bias: Tensor | None, tile: Tile, gated: bool = False, parts: bool = False
) -> Tensor:
    """Multiply `x[M, K]`, with rows of any stride, by the weight; return `y[M, N]` in x's dtype, or fp32 if the weight
    is.

    With `parts` and without a bias, the partial sums of splits of K may be returned as `Parts`. With `gated`,
    `weight[2N, K]` holds gate rows, then up rows, and y is `silu(x gate^T) * (x up^T)`. For FP8, the tile's width
    divides 128; for a tile of one row it is a multiple of 128, and `weight.by_one_row(gated)` holds.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_outputs = len(x), weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_rows, num_outputs, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    if not num_rows:
        return out
    if tile.rows == 1:
        launch_rows(x, weight, out, tile, _options(x, tile, weight), bias=bias, gated=gated)
        return out
    if tile.splits > 1 and num_rows > SPLIT_ROWS:
        for rows, answers in zip(x.split(SPLIT_ROWS), out.split(SPLIT_ROWS), strict=True):
            _multiply(rows, weight, bias, tile, gated, False, answers)
        return out
    return _multiply(x, weight, bias, tile, gated, parts, out)


def _multiply(
    x: Tensor, weight: UnpackedMatrix, bias: Tensor | None, tile: Tile, gated: bool, parts: bool, out: Tensor
) -> Tensor:
    """Compute `multiply` into `out` with tiles of several rows. All partial sums are in memory at once."""
    (num_rows, width), num_outputs = x.shape, out.shape[1]
    split_width = ceil_div(ceil_div(width, tile.width), tile.splits) * tile.width
    splits = ceil_div(width, split_width)
    sums = out
    if splits > 1:
        sums = torch.empty(splits, 1 + gated, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    given, made = Activations.of(x, tile.narrows), Activations(sums.view(-1, num_outputs), None)
    cut = (num_rows, min(tile.group, ceil_div(num_rows, tile.rows)), splits, split_width)
    launch_product(given, weight, made, tile, _options(x, tile, weight), cut, bias=bias, gated=gated)
    if splits == 1:
        return out
    own, *up = (Parts.of(kind.transpose(0, 1)) for kind in sums.unbind(1))
    return own if parts and bias is None and not gated else make(own, bias, out, *up)


def launch_product(
    x: Activations,
    weight: UnpackedMatrix,
    out: Activations,
    tile: Tile,
    options: dict[str, Any],
    cut: tuple[int, int, int, int],
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    squared: bool = False,
    limits: GateLimits | None = None,
    order: tuple[Tensor, Tensor | None] | None = None,
) -> None:
    """Launch products with `weight[N, K]`, or with `weight[E, N, K]` for the `order` of pairs and their tiles.

    `order` holds the fields of an `ExpertOrder`, or the experts of at most `tile.rows` tokens and None. `cut` is the
    number of rows, or of tiles or pairs, the group of `product_kernel`, and the splits of K and their width."""
    pairs, tiles = order or (None, None)
    codes, scales = matrix_parts(weight)
    num_rows, group, splits, split_width = cut
    num_outputs, width = weight.shape[-2] // (2 if gated else 1), weight.shape[-1]
    row_tiles = ceil_div(num_rows, tile.rows) if order is None else num_rows
    operands = (x.rows, codes, bias, out.rows, pairs, tiles)
    shape = (num_rows, num_outputs, width, x.rows.stride(0), out.rows.stride(0), split_width, splits, group)
    scaling = (scales, x.scales, x.scale_step, out.scales, out.scale_step)
    programs = row_tiles * ceil_div(num_outputs, tile.outputs) * splits
    sizes = {**tile.sizes, "ROWS": tile.rows, "TURNED": tile.turned, "num_stages": tile.num_stages}
    masks = {"MASK_OUTPUTS": num_outputs % tile.outputs != 0, "MASK_WIDTH": width % tile.width != 0}
    form = {**scale_options(weight), "SHARED": shares_scales(weight, tile, gated), "BITS": by_bits(weight)}
    form |= {"GATED": gated, **limit_options(limits), "SQUARED": squared, "SPLIT": splits > 1, **options}
    form["CHOICES"] = 0 if order is None or tiles is not None else next_power_of_2(group)
    product_kernel[(programs,)](*operands, *shape, *scaling, **sizes, **masks, **form)


def multiply_both(x: Tensor, weight: UnpackedMatrix, beside: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return `x[1, K] W^T` for two matrices in one launch. The second matrix has x's dtype; the tile has one row."""
    out, second = (x.new_empty(1, len(codes)) for codes in (matrix_parts(weight)[0], beside))
    launch_rows(x.contiguous(), weight, out, tile, _options(x, tile, weight), both=(beside, second))
    return out, second


def launch_rows(
    x: Tensor,
    weight: UnpackedMatrix,
    out: Tensor,
    tile: Tile,
    options: dict[str, Any],
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    squared: bool = False,
    limits: GateLimits | None = None,
    ids: Tensor | None = None,
    both: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Multiply each row by `weight[N, K]`, or by `weight[E, N, K]` of its expert if `ids[T, C]` are given."""
    beside, second = both or (None, None)
    beside_outputs = 0 if beside is None else len(beside)
    (num_rows, num_outputs), width = out.shape, x.shape[1]
    codes, scales = matrix_parts(weight)
    tiles = ceil_div(num_outputs, tile.outputs)
    operands = (x, codes, bias, out, ids, beside, second)
    counts = (num_outputs, width, x.stride(0), tiles, 1 if ids is None else ids.shape[1], beside_outputs)
    programs = num_rows * tiles + ceil_div(beside_outputs, BESIDE_OUTPUTS.value)
    form = {"STAGES": tile.num_stages, "GATED": gated, **limit_options(limits), "SQUARED": squared, **options}
    form |= scale_options(weight)
    _row_kernel[(programs,)](*operands, *counts, scales, **tile.sizes, **form)
