"""The product out of experts for many tokens, in Triton.

A program keeps its few columns of activation rows for several tiles of outputs, instead of loading them for each tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.linear.fp8_kernel import Activations
from forkpoint.ops.linear.scaled import BLOCK, ScaledMatrix
from forkpoint.ops.linear.sums_kernel import SCALE_WIDTH
from forkpoint.ops.moe.order_kernel import ExpertOrder

MOST_STEPS = 4  # scales of a kept row, that is 512 columns
# outputs per program, outputs per tile, weight tiles in flight
CHUNK, OUTPUTS, STAGES = tl.constexpr(512), tl.constexpr(64), tl.constexpr(3)
NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_tiles"])
def _kept_kernel(
    x,
    weight,
    out,
    pairs,
    tiles,
    num_tiles,
    num_outputs,
    x_stride,
    out_stride,
    scales,
    x_scales,
    x_scale_step,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute CHUNK outputs of ROWS places of one expert, over `STEPS * SCALE_WIDTH` columns."""
    WIDTH: tl.constexpr = STEPS * SCALE_WIDTH
    chunks = num_outputs // CHUNK
    number, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * CHUNK
    begin, end = tl.load(tiles + num_tiles + number), tl.load(tiles + 2 * num_tiles + number)
    if begin < end:
        matrix = tl.load(tiles + number).to(tl.int64)
        places = begin + tl.arange(0, ROWS)
        inside = places < end
        target = tl.load(pairs + places, mask=inside, other=0).to(tl.int64)
        columns, outputs = tl.arange(0, SCALE_WIDTH), tl.arange(0, OUTPUTS)
        x_at = x + places.to(tl.int64)[:, None] * x_stride + columns[None, :]
        kept, x_scale = (), ()
        for step in tl.static_range(STEPS):
            tile = tl.load(x_at + step * SCALE_WIDTH, mask=inside[:, None], other=0.0)
            kept += (tile,)  # type: ignore[assignment]
            scale = tl.load(x_scales + step * x_scale_step + places, mask=inside, other=0.0)
            x_scale += (scale,)  # type: ignore[assignment]
        rows = num_outputs // SCALE_WIDTH
        w_at = weight + (matrix * num_outputs + first) * WIDTH + outputs[:, None] * WIDTH + columns[None, :]
        out_at = out + target[:, None] * out_stride + first + outputs[None, :]
        for turn in tl.range(0, CHUNK // OUTPUTS, num_stages=STAGES):
            scale_at = scales + (matrix * rows + (first + turn * OUTPUTS) // SCALE_WIDTH) * STEPS
            acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for step in tl.static_range(STEPS):
                w_tile = tl.load(w_at + turn * OUTPUTS * WIDTH + step * SCALE_WIDTH)
                part = tl.dot(kept[step], tl.trans(w_tile))
                acc += part * (x_scale[step] * tl.load(scale_at + step))[:, None]
            tl.store(out_at + turn * OUTPUTS, acc.to(out.dtype.element_ty), mask=inside[:, None])


def keeps(x: Activations, weight: ScaledMatrix) -> bool:
    """Return whether `multiply_kept` supports these operands."""
    _, num_outputs, width = weight.shape
    whole = num_outputs % CHUNK.value == 0 and width % BLOCK == 0 and width <= MOST_STEPS * BLOCK
    return whole and x.scales is not None and weight.by_block and weight.rows == BLOCK


def multiply_kept(x: Activations, weight: ScaledMatrix, out: Activations, order: ExpertOrder, tile_rows: int) -> None:
    """Multiply places `x[P, K]` by `weight[E, N, K]` of their experts, and store the results to pairs `out[P, N]`."""
    num_outputs, width = weight.shape[1:]
    num_tiles = order.tiles.shape[1]
    operands = (x.rows, weight.codes, out.rows, order.pairs, order.tiles)
    counts = (num_tiles, num_outputs, x.rows.stride(0), num_outputs)
    options = {"ROWS": tile_rows, "STEPS": width // BLOCK, "num_warps": NUM_WARPS}
    _kept_kernel[(num_tiles * (num_outputs // CHUNK.value),)](
        *operands, *counts, weight.scales, x.scales, x.scale_step, **options
    )
