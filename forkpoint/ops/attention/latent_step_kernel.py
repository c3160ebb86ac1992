"""Decode attention over latents on a Hopper GPU, in Gluon: `latent_kernel` with explicit tiles and waits.

A program keeps tiles of latents in shared memory for both scores and sums, and requests the next tile when the matrix
units have finished with one. With one tile per program, two programs share a processor: one multiplies while the other
waits or computes exponentials. Programs with a processor of their own hold two tiles.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forkpoint.ops.attention.softmax import LOWEST
from forkpoint.ops.launch import await_inputs
from forkpoint.ops.metadata import TILE
from forkpoint.platforms.table import traits_of

KEYS = gl.constexpr(TILE)


@gluon.jit
def _ask(value_tiles, rope_tiles, block, wanted, arrived, latent, rope):
    """Start loading a block's latents into the tiles if it is `wanted`. `arrived` counts the bytes."""
    mbarrier.expect(arrived, value_tiles.block_type.nbytes + rope_tiles.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(rope_tiles, [block, 0, value_tiles.block_shape[2]], arrived, rope, pred=wanted)
    tma.async_copy_global_to_shared(value_tiles, [block, 0, 0], arrived, latent, pred=wanted)


@gluon.jit(do_not_specialize=["num_decodes", "table_stride"])
def latent_step_kernel(
    q,
    value_tiles,
    rope_tiles,
    out,
    acc_ptr,
    l_ptr,
    m_ptr,
    items,
    part_ptr,
    kv_lens,
    table_rows,
    block_table,
    num_decodes,
    table_stride,
    q_token,
    q_head,
    scale,
    HEADS: gl.constexpr,
    R: gl.constexpr,
    P: gl.constexpr,
    FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Attend to one of `items`, the parts of decode rows, without keys before FIRST. The columns of products are heads.

    `value_tiles` and `rope_tiles` describe tiles of the cache: the R dims of KEYS latents, and their last P dims. The
    program holds STAGES tiles."""
    await_inputs(OVERLAP)
    COLUMNS: gl.constexpr = triton.next_power_of_2(HEADS) if HEADS > 16 else 16
    pid = gl.program_id(0)
    if pid >= gl.load(part_ptr + num_decodes):
        return
    row, low, end = gl.load(items + 3 * pid), gl.load(items + 3 * pid + 1), gl.load(items + 3 * pid + 2)
    kv_len = gl.load(kv_lens + row)
    alone = gl.load(part_ptr + row + 1) - gl.load(part_ptr + row) == 1
    end = gl.minimum(end, (kv_len + KEYS - 1) // KEYS)
    table = block_table + gl.load(table_rows + row).to(gl.int64) * table_stride
    dtype: gl.constexpr = q.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HELD: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    latents = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, R], value_tiles.layout)
    rotated = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, P], rope_tiles.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        block = gl.load(table + low + i, mask=low + i < end, other=0)
        _ask(value_tiles, rope_tiles, block, low + i < end, arrived.index(i), latents.index(i), rotated.index(i))
    head = gl.arange(0, COLUMNS, gl.SliceLayout(1, LOADED))
    r, p = gl.arange(0, R, gl.SliceLayout(0, LOADED)), gl.arange(0, P, gl.SliceLayout(0, LOADED))
    q_at = q + row.to(gl.int64) * q_token + head[:, None] * q_head
    present = (head < HEADS)[:, None]
    loaded = gl.load(q_at + r[None, :], mask=present, other=0.0)
    q_latent = gl.allocate_shared_memory(dtype, [COLUMNS, R], HELD, loaded).permute((1, 0))
    loaded = gl.load(q_at + R + p[None, :], mask=present, other=0.0)
    q_rope = gl.allocate_shared_memory(dtype, [COLUMNS, P], HELD, loaded).permute((1, 0))
    weighted = gl.allocate_shared_memory(dtype, [KEYS, COLUMNS], gl.NVMMASharedLayout(2 * COLUMNS, 16, 2))
    fence_async_shared()

    acc, sums = gl.zeros((R, COLUMNS), gl.float32, SUMS), gl.zeros((KEYS, COLUMNS), gl.float32, SUMS)
    m_i = gl.full((COLUMNS,), LOWEST, gl.float32, gl.SliceLayout(0, SUMS))
    for j in range(low, end):
        turn, stored = (j - low) % STAGES, kv_len - j * KEYS
        here = arrived.index(turn)
        tile, rope = latents.index(turn).reshape([KEYS, R]), rotated.index(turn).reshape([KEYS, P])
        block = gl.load(table + gl.minimum(j + STAGES, end - 1))
        mbarrier.wait(here, (j - low) // STAGES & 1)
        if stored < KEYS:  # memory after a row's last latent may hold anything
            kept = (gl.arange(0, KEYS, gl.SliceLayout(1, LOADED)) < stored)[:, None]
            for c in gl.static_range(R // P):
                part = tile.slice(c * P, P, 1)
                part.store(gl.where(kept, part.load(LOADED), 0.0))
            fence_async_shared()
        scores = gl.zeros((KEYS, COLUMNS), gl.float32, SUMS)
        scores = warpgroup_mma(rope, q_rope, scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(tile, q_latent, scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        key = gl.arange(0, KEYS, gl.SliceLayout(1, SUMS))
        seen = key < stored
        if FIRST:
            seen = seen & (j * KEYS + key >= FIRST)
        scores = gl.where(seen[:, None], scores, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(scores, axis=0) * scale)
        weights, alpha = gl.exp2(scores * scale - m_new[None, :]), gl.exp2(m_i - m_new)
        sums, m_i = sums * alpha[None, :] + weights, m_new
        weighted.store(weights.to(dtype))
        fence_async_shared()
        acc = warpgroup_mma(tile.permute((1, 0)), weighted, acc * alpha[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _ask(value_tiles, rope_tiles, block, j + STAGES < end, here, latents.index(turn), rotated.index(turn))

    l_i = gl.sum(sums, axis=0)
    column, dim = gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS)), gl.arange(0, R, gl.SliceLayout(1, SUMS))
    inside = (column < HEADS)[None, :]
    if alone:
        out_at = out + (row.to(gl.int64) * HEADS + column)[None, :] * R + dim[:, None]
        gl.store(out_at, (acc / l_i[None, :]).to(dtype), mask=inside)
    else:
        entry = pid.to(gl.int64) * HEADS + column
        gl.store(acc_ptr + entry[None, :] * R + dim[:, None], acc, mask=inside)
        gl.store(l_ptr + entry, l_i, mask=column < HEADS)
        gl.store(m_ptr + entry, m_i, mask=column < HEADS)


def latent_steps(
    q: Tensor,
    cache: Tensor,
    rank: int,
    num_parts: int,
    operands: tuple[Any, ...],
    scale: float,
    options: dict[str, Any],
) -> None:
    """Launch the kernel over `num_parts` parts. `operands` are its arguments from `out` to `num_decodes`.

    `options` are FIRST and those of the launch.
    """
    _, heads, dim = q.shape
    tiles, shape, strides = gl.NVMMASharedLayout(128, 16, 3), [cache.shape[0], TILE, dim], [cache.stride(0), dim, 1]
    described = (TensorDescriptor(cache, shape, strides, [1, TILE, width], tiles) for width in (rank, dim - rank))
    held = 2 if num_parts <= traits_of(q.device).num_processors else 1
    sizes = {"HEADS": heads, "R": rank, "P": dim - rank, "STAGES": held, "num_warps": 4}
    steps = (operands[-2].stride(0), *q.stride()[:2])
    latent_step_kernel[(num_parts,)](q, *described, *operands, *steps, scale, **sizes, **options)
