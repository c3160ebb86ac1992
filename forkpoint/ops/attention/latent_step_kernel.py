"""Decode attention over latents on a Hopper GPU, in Gluon: `latent_kernel` with explicit tiles and waits.

A program keeps tiles of latents in shared memory for both scores and sums, and requests the next tile when the matrix
units have finished with one. A tile holds one block of KEYS tokens, or several smaller ones. With one tile per program,
two programs share a processor: one multiplies while the other waits or computes exponentials. Programs with a processor
of their own hold two tiles.
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
PANEL = 64  # columns of a tile that lie together in shared memory


@gluon.jit
def _blocks(table, first, end, BLOCKS: gl.constexpr):
    """Return BLOCKS blocks of a row's table from `first` on. From `end` on they are the last one again."""
    found = ()
    for i in gl.static_range(BLOCKS):
        at = gl.maximum(gl.minimum(first + i, end - 1), 0)
        found = found + (gl.load(table + at),)  # type: ignore[assignment] # noqa: RUF005 (Gluon has no other form)
    return found


@gluon.jit
def _ask(value_boxes, rope_boxes, blocks, wanted, arrived, values, rope, BLOCKS: gl.constexpr):
    """Start loading latents of blocks into the tiles if they are `wanted`. `arrived` counts the bytes."""
    R: gl.constexpr = values.shape[2]
    BLOCK: gl.constexpr = value_boxes.block_shape[1]
    WIDTH: gl.constexpr = value_boxes.block_shape[2]
    COPIES: gl.constexpr = R // WIDTH
    mbarrier.expect(
        arrived, BLOCKS * (COPIES * value_boxes.block_type.nbytes + rope_boxes.block_type.nbytes), pred=wanted
    )
    for i in gl.static_range(BLOCKS):
        own = rope.slice(i * BLOCK, BLOCK, 1)
        tma.async_copy_global_to_shared(rope_boxes, [blocks[i], 0, R], arrived, own, pred=wanted)
        for c in gl.static_range(COPIES):
            own = values.slice(i * BLOCK, BLOCK, 1).slice(c * WIDTH, WIDTH, 2)
            tma.async_copy_global_to_shared(value_boxes, [blocks[i], 0, c * WIDTH], arrived, own, pred=wanted)


@gluon.jit(do_not_specialize=["num_decodes", "table_stride"])
def latent_step_kernel(
    q,
    value_boxes,
    rope_boxes,
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
    PARTIAL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Attend to one of `items`, the parts of decode rows, without keys before FIRST. The columns of products are heads.

    `value_boxes` and `rope_boxes` describe what one copy reads of the cache: the R dims of a block's latents, or some
    of them, and their last P dims. The program holds STAGES tiles. With PARTIAL, rows of one part leave sums too."""
    await_inputs(OVERLAP)
    COLUMNS: gl.constexpr = triton.next_power_of_2(HEADS) if HEADS > 16 else 16
    BLOCK: gl.constexpr = value_boxes.block_shape[1]
    BLOCKS: gl.constexpr = KEYS // BLOCK  # blocks in a tile
    pid = gl.program_id(0)
    if pid >= gl.load(part_ptr + num_decodes):
        return
    row, low, end = gl.load(items + 3 * pid), gl.load(items + 3 * pid + 1), gl.load(items + 3 * pid + 2)
    kv_len = gl.load(kv_lens + row)
    num_parts = gl.load(part_ptr + row + 1) - gl.load(part_ptr + row)
    end = gl.minimum(end, (kv_len + BLOCK - 1) // BLOCK)
    last = gl.minimum(kv_len, end * BLOCK)  # the end of the part's keys
    table = block_table + gl.load(table_rows + row).to(gl.int64) * table_stride
    dtype: gl.constexpr = q.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HELD: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    latents = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, R], value_boxes.layout)
    rotated = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, P], rope_boxes.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        first = low + i * BLOCKS
        blocks, tiles = _blocks(table, first, end, BLOCKS), (latents.index(i), rotated.index(i))
        _ask(value_boxes, rope_boxes, blocks, first < end, arrived.index(i), *tiles, BLOCKS)
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
    for j in range(low, end, BLOCKS):
        number, stored = (j - low) // BLOCKS, last - j * BLOCK
        turn = number % STAGES
        here = arrived.index(turn)
        tile, rope = latents.index(turn).reshape([KEYS, R]), rotated.index(turn).reshape([KEYS, P])
        next_first = j + STAGES * BLOCKS
        blocks = _blocks(table, next_first, end, BLOCKS)
        mbarrier.wait(here, number // STAGES & 1)
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
            seen = seen & (j * BLOCK + key >= FIRST)
        scores = gl.where(seen[:, None], scores, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(scores, axis=0) * scale)
        weights, alpha = gl.exp2(scores * scale - m_new[None, :]), gl.exp2(m_i - m_new)
        sums, m_i = sums * alpha[None, :] + weights, m_new
        weighted.store(weights.to(dtype))
        fence_async_shared()
        acc = warpgroup_mma(tile.permute((1, 0)), weighted, acc * alpha[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        tiles = latents.index(turn), rotated.index(turn)
        _ask(value_boxes, rope_boxes, blocks, next_first < end, here, *tiles, BLOCKS)

    l_i = gl.sum(sums, axis=0)
    column, dim = gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS)), gl.arange(0, R, gl.SliceLayout(1, SUMS))
    inside = (column < HEADS)[None, :]
    if num_parts == (0 if PARTIAL else 1):
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

    `options` are FIRST, PARTIAL and those of the launch.
    """
    (_, heads, dim), block = q.shape, cache.shape[2]
    tiles, shape, strides = gl.NVMMASharedLayout(128, 16, 3), [cache.shape[0], block, dim], [cache.stride(0), dim, 1]
    # The panels of a block that is smaller than a tile lie apart, so that each needs a copy of its own.
    widths = (rank if block == TILE else PANEL, dim - rank)
    described = (TensorDescriptor(cache, shape, strides, [1, block, width], tiles) for width in widths)
    held = 2 if num_parts <= traits_of(q.device).num_processors else 1
    sizes = {"HEADS": heads, "R": rank, "P": dim - rank, "STAGES": held, "num_warps": 4}
    steps = (operands[-2].stride(0), *q.stride()[:2])
    latent_step_kernel[(num_parts,)](q, *described, *operands, *steps, scale, **sizes, **options)
