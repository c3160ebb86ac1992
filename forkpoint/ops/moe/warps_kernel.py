"""Products of FP8 activations with FP8 experts on a Hopper GPU, in Gluon: a group of warps that loads and two that
multiply.

The loading group copies activations and weights into a ring in shared memory. The two multiplying groups hold 64 rows
of pairs each. While one of them applies scales, the matrix units multiply for the other. As many programs as the device
has processors take one tile after the other, so that the next tile's loads run while a tile is stored.
"""

from __future__ import annotations

import math
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forkpoint.ops.launch import await_inputs
from forkpoint.ops.linear.fp8_kernel import Activations, narrowed
from forkpoint.ops.linear.scaled import BLOCK, ScaledMatrix
from forkpoint.ops.linear.sums_kernel import gate, limit_options
from forkpoint.ops.moe.order_kernel import ExpertOrder
from forkpoint.ops.parameters import GateLimits
from forkpoint.platforms.table import traits_of

ROWS = gl.constexpr(64)  # pairs per group that multiplies
GROUPS = gl.constexpr(2)
TILE = gl.constexpr(GROUPS.value * ROWS.value)
STEP = gl.constexpr(BLOCK)  # columns of a place in the ring, and rows of each of its two tiles of weights
STAGES = gl.constexpr(4)
LOADERS = gl.constexpr(128)  # threads of the group that loads
REGISTERS = gl.constexpr((224, 56))  # per thread of the second group and the loading one; the first has the rest
MOST_KEPT = 4  # tiles of outputs that a program computes in turn for the same rows, if there are many tiles
MANY_TILES = 32  # tiles of outputs per program from which there are many


@gluon.jit
def _tile(tiles, num_tiles, number, output_tiles):
    """Return a tile's expert, its first place, the end of its expert's places, and its number among output tiles."""
    tile = number // output_tiles
    matrix, begin = gl.load(tiles + tile), gl.load(tiles + num_tiles + tile)
    return matrix, begin, gl.load(tiles + 2 * num_tiles + tile), number % output_tiles


@gluon.jit
def _load(tensors, ring, counts, x_stride, x_scale_step, KEPT: gl.constexpr, GATED: gl.constexpr):
    """Copy the steps of all tiles of this program into the ring, one after the other."""
    x, weights, pairs, tiles, scales, x_scales = tensors
    x_ring, weight_ring, x_scale_ring, scale_ring, arrived, freed = ring
    num_tiles, output_tiles, steps, choices, matrix_rows, second = counts
    LOADED: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    columns = gl.arange(0, STEP, gl.SliceLayout(0, LOADED))[None, :]
    count = 0
    for start in range(gl.program_id(0) * KEPT, num_tiles * output_tiles, gl.num_programs(0) * KEPT):
        matrix, begin, behind, output = _tile(tiles, num_tiles, start, output_tiles)
        if begin < behind:
            row, line = begin + gl.arange(0, TILE, gl.SliceLayout(1, LOADED)), begin + gl.arange(0, TILE, LINE)
            row_inside, line_inside = (row < behind)[:, None], line < behind
            if GATED:
                row = gl.load(pairs + row, mask=row < behind, other=0) // choices
                line = gl.load(pairs + line, mask=line_inside, other=0) // choices
            x_at, x_scale_at = x + ((row.to(gl.int64) * x_stride)[:, None] + columns), x_scales + line
            for turn in range(KEPT):
                first = matrix * matrix_rows + (output + turn) * (STEP if GATED else 2 * STEP)
                scale_at = scales + first // STEP * steps + gl.arange(0, 1, LINE)
                for step in range(steps):
                    stage = count % STAGES
                    here = arrived.index(stage)
                    mbarrier.wait(freed.index(stage), (count // STAGES & 1) ^ 1)
                    mbarrier.expect(here, 2 * weights.block_type.nbytes)
                    for half in gl.static_range(2):
                        at = [first + half * second, step * STEP]
                        tma.async_copy_global_to_shared(weights, at, here, weight_ring.index(2 * stage + half))
                        own_scale = scale_at + half * (second // STEP * steps) + step
                        async_copy.async_copy_global_to_shared(scale_ring.index(2 * stage + half), own_scale)
                    if turn == 0:  # in later turns, the step's columns of x are still at this place
                        x_here, x_scale_here = x_ring.index(stage), x_scale_ring.index(stage)
                        async_copy.async_copy_global_to_shared(x_here, x_at + step * STEP, mask=row_inside)
                        x_scale_here_at = x_scale_at + step * x_scale_step
                        async_copy.async_copy_global_to_shared(x_scale_here, x_scale_here_at, mask=line_inside)
                    async_copy.mbarrier_arrive(here, increment_count=False)
                    count += 1


@gluon.jit
def _sums(ring, count, steps, HALF: gl.constexpr, SUMS: gl.constexpr):
    """Return the sums of this group's rows with both tiles of weights, over all steps of K."""
    x_ring, weight_ring, x_scale_ring, scale_ring, arrived, freed = ring
    LINE: gl.constexpr = gl.SliceLayout(1, SUMS)
    none = gl.zeros((ROWS, STEP), gl.float32, SUMS)
    acc, up = none, none
    for step in range(steps):
        stage = (count + step) % STAGES
        own = x_ring.index(stage).slice(HALF * ROWS, ROWS)
        mbarrier.wait(arrived.index(stage), (count + step) // STAGES & 1)
        fence_async_shared()  # without it, products need not see what the copies of x wrote
        part = warpgroup_mma(own, weight_ring.index(2 * stage).permute((1, 0)), none, use_acc=False, is_async=True)
        x_scale = x_scale_ring.index(stage).slice(HALF * ROWS, ROWS).load(LINE)
        scale, up_scale = scale_ring.index(2 * stage).load(LINE), scale_ring.index(2 * stage + 1).load(LINE)
        part = warpgroup_mma_wait(0, deps=(part,))
        acc = acc + part * (x_scale * scale)[:, None]
        part = warpgroup_mma(own, weight_ring.index(2 * stage + 1).permute((1, 0)), none, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(freed.index(stage))
        up = up + part * (x_scale * up_scale)[:, None]
    return acc, up


@gluon.jit
def _store(value, out, rows, first, out_stride, inside, STORED: gl.constexpr):
    """Store rows of STEP columns, 16 bytes a thread, to the rows of `out` that are `inside`."""
    columns = first + gl.arange(0, STEP, gl.SliceLayout(0, STORED))[None, :]
    value = gl.convert_layout(value.to(out.dtype.element_ty), STORED)
    gl.store(out + rows.to(gl.int64)[:, None] * out_stride + columns, value, mask=inside[:, None])


@gluon.jit
def _multiply(
    tensors,
    ring,
    counts,
    out_stride,
    out_scale_step,
    HALF: gl.constexpr,
    KEPT: gl.constexpr,
    GATED: gl.constexpr,
    GATE_LIMIT: gl.constexpr,
    UP_LIMIT: gl.constexpr,
):
    """Compute rows `[HALF * ROWS, (HALF + 1) * ROWS)` of all tiles of this program."""
    out, pairs, tiles, out_scales = tensors
    arrived, freed = ring[4], ring[5]
    num_tiles, output_tiles, steps, _, _, _ = counts
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    WIDTH: gl.constexpr = 16 if GATED else 8  # elements that a thread stores at once
    STORED: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 * WIDTH // STEP, STEP // WIDTH], [4, 1], [1, 0])
    count = 0
    for start in range(gl.program_id(0) * KEPT, num_tiles * output_tiles, gl.num_programs(0) * KEPT):
        _, begin, behind, output = _tile(tiles, num_tiles, start, output_tiles)
        if begin < behind:
            begin = begin + HALF * ROWS
            rows = begin + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
            inside = rows < behind
            if not GATED:
                rows = gl.load(pairs + rows, mask=inside, other=0)
            for turn in range(KEPT):
                if begin < behind:
                    acc, up = _sums(ring, count, steps, HALF, SUMS)
                    if GATED:
                        acc, scale = narrowed(gate(acc, up, gl.bfloat16, GATE_LIMIT, UP_LIMIT))
                        _store(acc, out, rows, (output + turn) * STEP, out_stride, inside, STORED)
                        own = begin + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
                        gl.store(out_scales + (output + turn) * out_scale_step + own, scale, mask=own < behind)
                    else:
                        first = (output + turn) * 2 * STEP
                        _store(acc, out, rows, first, out_stride, inside, STORED)
                        _store(up, out, rows, first + STEP, out_stride, inside, STORED)
                else:  # the tile has no rows for this group
                    for step in range(steps):
                        stage = (count + step) % STAGES
                        mbarrier.wait(arrived.index(stage), (count + step) // STAGES & 1)
                        mbarrier.arrive(freed.index(stage))
                count += steps


@gluon.jit(do_not_specialize=["num_tiles", "choices"])
def expert_warps_kernel(
    x,
    weights,
    out,
    pairs,
    tiles,
    num_tiles,
    num_outputs,
    width,
    choices,
    x_stride,
    out_stride,
    scales,
    x_scales,
    x_scale_step,
    out_scales,
    out_scale_step,
    KEPT: gl.constexpr,
    GATED: gl.constexpr,
    GATE_LIMIT: gl.constexpr,
    UP_LIMIT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Multiply pairs, in tiles of an `ExpertOrder` of TILE places, by the matrices of their experts.

    `weights` describes the matrices as `[experts * rows, width]`, in boxes of STEP x STEP. If GATED, the product is
    the one into experts: it reads tokens, of `choices` pairs each, and stores `silu(gate) * up` to places in FP8, with
    one scale per STEP columns. Otherwise it reads places and stores to pairs in bfloat16. A program computes KEPT
    adjacent tiles of outputs for the same rows, and copies the rows once. If KEPT is not 1, K has STAGES steps."""
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    HELD: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TILE, STEP], HELD)
    weight_ring = gl.allocate_shared_memory(x.dtype.element_ty, [2 * STAGES, STEP, STEP], weights.layout)
    x_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], PLAIN)
    scale_ring = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], PLAIN)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1 + LOADERS)
        mbarrier.init(freed.index(i), count=GROUPS)
    fence_async_shared()
    await_inputs(OVERLAP)
    ring = (x_ring, weight_ring, x_scale_ring, scale_ring, arrived, freed)
    output_tiles = num_outputs // (STEP if GATED else 2 * STEP)
    # The rows of an expert's matrix, and how many rows the second tile of weights of a step lies behind the first.
    matrix_rows, second = num_outputs, STEP
    if GATED:
        matrix_rows, second = 2 * num_outputs, num_outputs
    counts = (num_tiles, output_tiles, width // STEP, choices, matrix_rows, second)
    read, written = (x, weights, pairs, tiles, scales, x_scales), (out, pairs, tiles, out_scales)
    gl.warp_specialize(
        [
            (_multiply, (written, ring, counts, out_stride, out_scale_step, 0, KEPT, GATED, GATE_LIMIT, UP_LIMIT)),
            (_multiply, (written, ring, counts, out_stride, out_scale_step, 1, KEPT, GATED, GATE_LIMIT, UP_LIMIT)),
            (_load, (read, ring, counts, x_stride, x_scale_step, KEPT, GATED)),
        ],
        [4, 4],
        REGISTERS,
    )


def multiply_experts(
    x: Activations,
    weight: ScaledMatrix,
    out: Activations,
    order: ExpertOrder,
    options: dict[str, Any],
    *,
    gated: bool = False,
    choices: int = 1,
    limits: GateLimits | None = None,
) -> None:
    """Multiply `x` by `weight[E, N, K]` of the experts of its pairs, as `expert_warps_kernel` says."""
    num_outputs, width = weight.shape[-2] // (2 if gated else 1), weight.shape[-1]
    num_tiles, output_tiles = order.tiles.shape[1], num_outputs // (BLOCK if gated else 2 * BLOCK)
    processors = traits_of(x.rows.device).num_processors
    keeps = width == STAGES.value * BLOCK and num_tiles * output_tiles >= MANY_TILES * processors
    kept = math.gcd(output_tiles, MOST_KEPT) if keeps else 1
    programs = min(processors, num_tiles * output_tiles // kept)
    boxes, layout = [STEP.value, STEP.value], gl.NVMMASharedLayout(128, 8, 2)
    described = TensorDescriptor.from_tensor(weight.codes.view(-1, width), boxes, layout)
    counts = (num_tiles, num_outputs, width, choices, x.rows.stride(0), out.rows.stride(0))
    scaling = (weight.scales, x.scales, x.scale_step, out.scales, out.scale_step)
    form = {"KEPT": kept, "GATED": gated, **limit_options(limits), "num_warps": 4, **options}
    operands = (x.rows, described, out.rows, order.pairs, order.tiles)
    expert_warps_kernel[(programs,)](*operands, *counts, *scaling, **form)
