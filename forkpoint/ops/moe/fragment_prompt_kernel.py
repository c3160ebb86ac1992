"""Products of many tokens by experts in 4 bits, in Triton: whole warp groups widen weights in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.linear.fragments import FragmentMatrix
from forkpoint.ops.linear.fragments_kernel import FragmentTile
from forkpoint.ops.linear.sums_kernel import gate, limit_options, relu_squared
from forkpoint.ops.linear.unpack_kernel import (
    FLOAT_FACTOR,
    GROUP_OF_FLOATS,
    PAIRS,
    STRIP_ROWS,
    WIDTH,
    WORDS,
    across,
    by_pairs,
    fragment_rows,
    fragments,
    row_places,
)
from forkpoint.ops.moe.order_kernel import ExpertOrder, rows_of_tile
from forkpoint.ops.parameters import GateLimits


@triton.jit(do_not_specialize=["num_tiles", "choices"])
def prompt_product_kernel(
    x,
    words,
    scales,
    factors,
    out,
    pairs,
    tiles,
    num_tiles,
    num_outputs,
    width,
    num_fragments,
    x_stride,
    out_stride,
    choices,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    INTO: tl.constexpr,
    GATED: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    UP_LIMIT: tl.constexpr,
    SQUARED: tl.constexpr,
    BITS: tl.constexpr,
):
    """Compute `OUTPUTS` rows of an expert's weight times ROWS rows of x, whose columns are in the order of `across`.

    The arguments are those of `fragments_product_kernel`. Integers are multiplied by their scales, both in bfloat16,
    before the product."""
    FLOATS: tl.constexpr = GROUP == GROUP_OF_FLOATS
    SHOWN: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    pid = tl.program_id(0)
    output_tiles = num_outputs // SHOWN
    tile, first = pid // output_tiles, pid % output_tiles * SHOWN
    begin, behind = tl.load(tiles + num_tiles + tile), tl.load(tiles + 2 * num_tiles + tile)
    if begin >= behind:
        return
    matrix = tl.load(tiles + tile).to(tl.int64)
    rows, targets, rows_inside = rows_of_tile(pairs, begin, behind, choices, ROWS, INTO)
    matrix_rows = num_outputs * (2 if GATED else 1)
    at, own = fragment_rows(OUTPUTS, WARPS, False)[0], tl.arange(0, OUTPUTS)
    if INTO:  # the hidden columns are written in the order in which the second product takes them
        at, own = at // SHOWN * SHOWN + across(at % SHOWN), own // SHOWN * SHOWN + across(own % SHOWN)
    at = first + at % SHOWN + at // SHOWN * num_outputs
    own = first + own % SHOWN + own // SHOWN * num_outputs
    above = matrix * matrix_rows
    word = tl.arange(0, WORDS)
    words += above * (num_fragments * WORDS)
    word_at = row_places(at, num_fragments, WORDS)[:, None] + word[None, :]
    if FLOATS:
        scales += above * (num_fragments * PAIRS)
        scale_at = row_places(at, num_fragments, PAIRS)[:, None] + (word % 4)[None, :]
    else:
        scales += above * (width // GROUP)
    x_at = (rows * x_stride)[:, None] + tl.arange(0, WIDTH)[None, :]
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in tl.range(0, width // WIDTH, num_stages=STAGES):
        code = tl.load(words + word_at + step * (STRIP_ROWS * WORDS))
        value = tl.load(x + x_at + step * WIDTH)
        if FLOATS:
            beside = tl.load(scales + scale_at + step * (STRIP_ROWS * PAIRS))
            weight = fragments(code, beside, WARPS, False, True, BITS, True)
        else:
            scale = tl.load(scales + step * WIDTH // GROUP * matrix_rows + own)[:, None]
            weight = fragments(code, code, WARPS, False, False, BITS, True)
            if BITS:
                weight *= scale.to(tl.bfloat16)
            else:  # not every device multiplies bfloat16 numbers
                weight = (weight.to(tl.float32) * scale.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(weight, tl.trans(value), acc)
    factor = tl.load(factors + above + own)
    if FLOATS:
        factor *= FLOAT_FACTOR
    acc *= factor[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        both = tl.permute(tl.reshape(acc, (2, SHOWN, ROWS)), (1, 2, 0))
        acc, up = tl.split(both)
        acc = gate(acc, up, dtype, GATE_LIMIT, UP_LIMIT)
    if SQUARED:
        acc = relu_squared(acc, dtype)
    outputs = first + tl.arange(0, SHOWN)
    line = outputs[:, None] + targets[None, :] * out_stride
    tl.store(out + line, acc.to(dtype), mask=rows_inside[None, :] & (outputs < num_outputs)[:, None])


def columns_across(x: Tensor) -> Tensor:
    """Return `x[M, K]` in bfloat16 with its columns in the order of `across`."""
    pairs = x.contiguous().view(torch.int32).view(len(x), -1, 4, 2).transpose(2, 3)
    return pairs.reshape(len(x), -1).view(x.dtype)


def launch_prompt(
    x: Tensor,
    weight: FragmentMatrix,
    out: Tensor,
    tile: FragmentTile,
    order: ExpertOrder,
    choices: int,
    *,
    into: bool,
    gated: bool = False,
    squared: bool = False,
    limits: GateLimits | None = None,
) -> None:
    """Launch products with `weight[E, N, K]`, N a multiple of the tile's outputs, for the tiles of `order`.

    The columns of x are in the order of `across`, as are those of the output if `into`."""
    num_outputs, width = weight.shape[-2] // (2 if gated else 1), weight.shape[-1]
    num_tiles = order.tiles.shape[1]
    operands = (x, weight.words, weight.scales, weight.factors, out, order.pairs, order.tiles)
    counts = (num_tiles, num_outputs, width, weight.words.shape[-2], x.stride(0), out.stride(0), choices)
    sizes: dict[str, Any] = {"GROUP": weight.group, "ROWS": tile.rows, "OUTPUTS": tile.outputs}
    sizes |= {"WARPS": tile.num_warps, "STAGES": tile.num_stages, "num_warps": tile.num_warps}
    form = {"INTO": into, "GATED": gated, **limit_options(limits), "SQUARED": squared, "BITS": by_pairs(weight)}
    programs = num_tiles * (num_outputs // (tile.outputs // (2 if gated else 1)))
    prompt_product_kernel[(programs,)](*operands, *counts, **sizes, **form)
