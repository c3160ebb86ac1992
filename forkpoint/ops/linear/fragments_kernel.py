"""Products with weights in 4 bits in fragments, in Triton. fragments.py has the layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_before, overlap, start_next
from forkpoint.ops.linear.fragments import FRAGMENT, FragmentMatrix
from forkpoint.ops.linear.parts_kernel import make
from forkpoint.ops.linear.sums_kernel import gate, limit_options, relu_squared
from forkpoint.ops.linear.unpack_kernel import (
    FLOAT_FACTOR,
    GROUP_OF_FLOATS,
    PAIRS,
    STRIP_ROWS,
    WIDTH,
    WORDS,
    by_pairs,
    fragment_rows,
    fragments,
    row_places,
)
from forkpoint.ops.moe.order_kernel import ExpertOrder, rows_of_tile
from forkpoint.ops.parameters import GateLimits
from forkpoint.ops.rounding import ceil_div
from forkpoint.ops.unmade import Parts


@dataclass(frozen=True, slots=True)
class FragmentTile:
    """The elements that a program computes, `rows x outputs`, over one of `splits` parts of K.

    With `deep`, each warp computes all outputs, of which there are 16 or 32, over every `num_warps`-th block of
    FRAGMENT columns. That keeps more warps busy where outputs are few. Otherwise warps have 16 outputs or a multiple.
    With four such warps and more than 8 rows, or with fewer outputs than rows, the compiler chooses another layout for
    the matrix units, and weights move between threads.
    """

    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    splits: int = 1
    deep: bool = False


MOST_GATED_ROWS: Final = 32  # rows up to which a gated product is one launch
MANY_OUTPUTS: Final = 4096  # outputs; with fewer, K is split, because there are too few programs
MOST_SPLITS: Final = 8


def fragment_tile(num_rows: int, weight: FragmentMatrix, gated: bool = False) -> FragmentTile:
    """Return the fastest tile for a product of few rows."""
    num_outputs, width = weight.shape
    if num_outputs <= MANY_OUTPUTS and not gated:
        splits = max(1, min(MOST_SPLITS, width // (4 * FRAGMENT)))
        if num_rows <= 8:
            return FragmentTile(8, 32, 2, 4, splits)
        return FragmentTile(16 if num_rows <= 16 else 32, 64, 2, 4, splits)
    if num_rows <= 8:
        return FragmentTile(8, 32, 2, 4) if weight.floats else FragmentTile(8, 32, 4, 3, deep=True)
    return FragmentTile(16, 64, 2, 4) if num_rows <= 32 else FragmentTile(32, 64, 2, 3)


@triton.jit(do_not_specialize=["num_rows", "splits", "choices", "split_steps"])
def fragments_product_kernel(
    x,
    words,
    scales,
    factors,
    bias,
    out,
    pairs,
    tiles,
    num_rows,
    num_outputs,
    width,
    num_fragments,
    x_stride,
    out_stride,
    choices,
    splits,
    split_steps,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    DEEP: tl.constexpr,
    INTO: tl.constexpr,
    GATED: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    UP_LIMIT: tl.constexpr,
    SQUARED: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `OUTPUTS` weight rows times ROWS rows of x.

    With `tiles`, the weight is an expert's; `tiles` and `pairs` come from `ExpertOrder`. With `pairs` alone, each pair
    of a token and an expert has a tile of its own, and `pairs` holds the experts. `rows_of_tile` has INTO and
    `choices`. If GATED, a tile has as many rows of the first half of the weight as of the second, and
    `silu(gate) * up` is stored (limits: see `gate`)."""
    await_before(OVERLAP)
    FLOATS: tl.constexpr = GROUP == GROUP_OF_FLOATS
    SHOWN: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    pid = tl.program_id(0)
    output_tiles = tl.cdiv(num_outputs, SHOWN)
    DEPTH: tl.constexpr = WARPS if DEEP else 1  # blocks of columns in a step
    start, end, split = 0, width // (WIDTH * DEPTH), 0
    if SPLIT:
        split = pid % splits
        pid = pid // splits
        start = split * split_steps
        end = tl.minimum(start + split_steps, end)
    tile = pid // output_tiles
    first = pid % output_tiles * SHOWN
    matrix_rows = num_outputs * (2 if GATED else 1)
    above = 0  # weight rows before those of the expert
    if tiles is not None:
        begin, behind = tl.load(tiles + num_rows + tile), tl.load(tiles + 2 * num_rows + tile)
        if begin >= behind:
            return
        above = tl.load(tiles + tile).to(tl.int64) * matrix_rows
        rows, targets, rows_inside = rows_of_tile(pairs, begin, behind, choices, ROWS, INTO)
    elif pairs is not None:
        above = tl.load(pairs + tile).to(tl.int64) * matrix_rows
        rows_inside = tl.arange(0, ROWS) < 1
        targets = tl.zeros((ROWS,), tl.int64) + tile
        rows = targets // choices if INTO else targets
    else:
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        rows_inside, targets = rows < num_rows, rows
        rows = tl.minimum(rows, num_rows - 1)
    # Rows beyond the last repeat it. They are not stored.
    at, block = fragment_rows(OUTPUTS, WARPS, DEEP)
    own = tl.arange(0, OUTPUTS)
    if GATED:
        at = tl.minimum(first + at % SHOWN, num_outputs - 1) + at // SHOWN * num_outputs
        own = tl.minimum(first + own % SHOWN, num_outputs - 1) + own // SHOWN * num_outputs
    else:
        at = tl.minimum(first + at, num_outputs - 1)
        own = tl.minimum(first + own, num_outputs - 1)
    word = tl.arange(0, WORDS)
    words += above * (num_fragments * WORDS)
    word_at = (row_places(at, num_fragments, WORDS) + block * (STRIP_ROWS * WORDS))[:, None] + word[None, :]
    x_at, x_inside = (rows * x_stride)[:, None] + tl.arange(0, WIDTH)[None, :], rows_inside[:, None]
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    scale_at, scale_block = own, 0
    if DEEP:
        blocks = tl.arange(0, DEPTH)
        x_at, x_inside = x_at[None, :, :] + blocks[:, None, None] * WIDTH, x_inside[None, :, :]
        acc = tl.zeros((DEPTH, OUTPUTS, ROWS), tl.float32)
        scale_at, scale_block = own[None, :], blocks[:, None]
    if FLOATS:
        scales += above * (num_fragments * PAIRS)
        scale_at = (row_places(at, num_fragments, PAIRS) + block * (STRIP_ROWS * PAIRS))[:, None] + (word % 4)[None, :]
        scale = tl.zeros((1,), tl.float16)
    else:
        scales += above * (width // GROUP)
        scale = tl.load(scales + (start * DEPTH + scale_block) * WIDTH // GROUP * matrix_rows + scale_at)
    for step in tl.range(start, end, num_stages=STAGES):
        code = tl.load(words + word_at + step * (STRIP_ROWS * WORDS * DEPTH))
        value = tl.load(x + x_at + step * (WIDTH * DEPTH), mask=x_inside, other=0.0)
        value = tl.permute(value, (0, 2, 1)) if DEEP else tl.trans(value)
        if FLOATS:
            beside = tl.load(scales + scale_at + step * (STRIP_ROWS * PAIRS * DEPTH))
            acc = tl.dot(fragments(code, beside, WARPS, DEEP, True, BITS), value, acc)
        else:
            # Loaded a step ahead, because loads of so few bytes are not pipelined.
            coming = tl.minimum(step + 1, end - 1) * DEPTH + scale_block
            next_scale = tl.load(scales + coming * WIDTH // GROUP * matrix_rows + scale_at)
            part = tl.dot(fragments(code, code, WARPS, DEEP, False, BITS), value)
            acc += part * tl.expand_dims(scale.to(tl.float32), -1)
            scale = next_scale
    if DEEP:
        acc = tl.sum(acc, 0)
    start_next(OVERLAP)
    factor = tl.load(factors + above + own)
    if FLOATS:
        factor *= FLOAT_FACTOR
    acc *= factor[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        both = tl.permute(tl.reshape(acc, (2, SHOWN, ROWS)), (1, 2, 0))
        acc, up = tl.split(both)
        if not SPLIT:
            acc = gate(acc, up, dtype, GATE_LIMIT, UP_LIMIT)
    outputs = first + tl.arange(0, SHOWN)
    inside = (outputs < num_outputs)[:, None] & rows_inside[None, :]
    line = outputs[:, None] + targets[None, :] * out_stride
    if SPLIT:
        sums = out + num_rows.to(tl.int64) * num_outputs * split + line
        tl.store(sums, acc, mask=inside)
    else:
        if bias is not None:
            acc += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
        if SQUARED:
            acc = relu_squared(acc, dtype)
        tl.store(out + line, acc.to(dtype), mask=inside)


def fitting(tile: FragmentTile, width: int) -> FragmentTile:
    """Return the tile with as many warps as divide the blocks of columns, if it is deep."""
    warps = tile.num_warps
    while tile.deep and width // FRAGMENT % warps:
        warps //= 2
    return replace(tile, num_warps=warps)


def multiply_fragments(
    x: Tensor,
    weight: FragmentMatrix,
    bias: Tensor | None,
    tile: FragmentTile,
    gated: bool = False,
    parts: bool = False,
) -> Tensor:
    """Multiply `x[M, K]`, in the order of the weight's codes, by `weight[N, K]`; return `y[M, N]` in bfloat16.

    With `parts` and without a bias, the partial sums of splits of K may be returned as `Parts`. With `gated`,
    `weight[2N, K]` holds gate rows, then up rows, K is not split, and y is `silu(x gate^T) * (x up^T)`.
    """
    num_rows, num_outputs = len(x), weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    tile = fitting(tile, weight.shape[1])
    blocks = weight.shape[1] // FRAGMENT // (tile.num_warps if tile.deep else 1)
    steps = ceil_div(blocks, tile.splits)
    splits = ceil_div(blocks, steps)
    sums = out
    if splits > 1:
        sums = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    cut = (num_rows, ceil_div(num_rows, tile.rows), splits, steps)
    launch_fragments(x, weight, sums, tile, cut, bias=bias, gated=gated)
    if splits == 1:
        return out
    own = Parts.of(sums.transpose(0, 1))
    return own if parts and bias is None else make(own, bias, out)


def launch_fragments(
    x: Tensor,
    weight: FragmentMatrix,
    out: Tensor,
    tile: FragmentTile,
    cut: tuple[int, int, int, int],
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    squared: bool = False,
    limits: GateLimits | None = None,
    order: ExpertOrder | None = None,
    ids: Tensor | None = None,
    choices: int = 1,
    into: bool = False,
) -> None:
    """Launch products with `weight[N, K]`, or with `weight[E, N, K]` for the tiles of `order` or the pairs of `ids`.

    `cut` is the number of rows (of tiles, with `order`), the number of row tiles, and the splits of K and their
    steps."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, row_tiles, splits, split_steps = cut
    num_outputs, width = weight.shape[-2] // (2 if gated else 1), weight.shape[-1]
    tile = fitting(tile, width)
    pairs, tiles = (ids, None) if order is None else (order.pairs, order.tiles)
    operands = (x, weight.words, weight.scales, weight.factors, bias, out, pairs, tiles)
    counts = (num_rows, num_outputs, width, weight.words.shape[-2], x.stride(0), out.stride(-2))
    sizes: dict[str, Any] = {"GROUP": weight.group, "ROWS": tile.rows, "OUTPUTS": tile.outputs}
    sizes |= {"WARPS": tile.num_warps, "DEEP": tile.deep, "STAGES": tile.num_stages, "num_warps": tile.num_warps}
    form = {"INTO": into, "GATED": gated, **limit_options(limits), "SQUARED": squared, "SPLIT": splits > 1}
    form |= {"BITS": by_pairs(weight), **overlap(x.device, len(x))}
    programs = row_tiles * ceil_div(num_outputs, tile.outputs // (2 if gated else 1)) * splits
    fragments_product_kernel[(programs,)](*operands, *counts, choices, splits, split_steps, **sizes, **form)
