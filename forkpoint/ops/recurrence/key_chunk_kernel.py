"""Chunks of the delta rule with a decay for each key (KDA) made ready for `key_kernel.py`, in Triton.

Decays stand inside the products of keys. The first launch writes q and k times what is left of them, the second their
products: a row's decay to a key is the product of one that ends and one that starts at the first row of the row's 16,
so that no exponent is positive. Rows of one such block have no row between them, and each pair its own exponential:
decays are not bounded. The third inverts the chunk's system.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.metadata import TILE, SegmentIndex
from forkpoint.ops.recurrence.gates import L2_EPS, key_decay, weight
from forkpoint.ops.recurrence.solve import BLOCKS, CHUNK, SUB, chunk_place, unit_lower_inverse
from forkpoint.ops.table import RecurrenceParams


@triton.jit
def _chunk_kernel(
    mixed,
    a,
    a_log,
    dt_bias,
    tiles,
    cu_seqlens,
    keys,
    totals,
    wholes,
    mixed_stride,
    a_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BOUND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One chunk of one head: `totals[entry]`, the sums of its logs of decays up to each row, `[C, K]`, and
    `keys[entry]`, the factors of `S k`, `S q` and of the state's update, `[3, C, K]`."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    tile, head = pid // H, pid % H
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    kind: tl.constexpr = keys.dtype.element_ty
    start, count, entry = chunk_place(cu_seqlens, segment, offset, head, H)
    row, col = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token = start.to(tl.int64) + row
    inside = (row < count)[:, None] & (col < K)[None, :]
    raw = tl.load(a + token[:, None] * a_stride + (head * K + col)[None, :], mask=inside, other=0.0)
    bias = tl.load(dt_bias + head * K + col, mask=col < K, other=0.0)
    g = tl.where(inside, key_decay(raw, tl.load(a_log + head), bias[None, :], BOUND), 0.0)
    total, last = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
    own = row[:, None] * K + col[None, :]
    in_keys = (col < K)[None, :] & (row >= 0)[:, None]
    tl.store(totals + entry * (CHUNK * K) + own, total, mask=in_keys)
    tl.store(wholes + entry * K + col, tl.exp(last), mask=col < K)
    grown = tl.exp(total)
    q_at = mixed + token[:, None] * mixed_stride + (head * K + col)[None, :]
    key_at = keys + entry * (3 * CHUNK * K) + own
    k = tl.load(q_at + H * K, mask=inside, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + L2_EPS)[:, None]
    tl.store(key_at, (k * grown).to(kind), mask=in_keys)
    tl.store(key_at + 2 * CHUNK * K, (k * tl.exp(last[None, :] - total)).to(kind), mask=in_keys)
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + L2_EPS) * scale)[:, None]
    tl.store(key_at + CHUNK * K, (q * grown).to(kind), mask=in_keys)


@triton.jit
def _pair_kernel(
    mixed,
    b,
    tiles,
    cu_seqlens,
    totals,
    systems,
    scores,
    mixed_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """SUB rows i of a chunk: `sum_d x_id k_jd e^{total_id - total_jd}` with all rows j of the chunk, for x = q where
    i >= j, else 0 -> `scores`, and for x = beta k where i > j, else 0 -> fp32 `systems`; both `[entries, C, C]`."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    block, head, tile = pid % BLOCKS, pid // BLOCKS % H, pid // (BLOCKS * H)
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    kind: tl.constexpr = scores.dtype.element_ty
    start, count, entry = chunk_place(cu_seqlens, segment, offset, head, H)
    sub, col = tl.arange(0, SUB), tl.arange(0, BLOCK_K)
    row, in_k = block * SUB + sub, col < K
    inside = (row < count)[:, None] & in_k[None, :]
    token = start.to(tl.int64) + row
    q_at, total_at = mixed + (head * K + col), totals + entry * (CHUNK * K) + col
    k_at = q_at + H * K
    q = tl.load(q_at[None, :] + token[:, None] * mixed_stride, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_at[None, :] + token[:, None] * mixed_stride, mask=inside, other=0.0).to(tl.float32)
    k_scale = tl.rsqrt(tl.sum(k * k, axis=1) + L2_EPS)
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + L2_EPS) * scale)[:, None]
    left = k * k_scale[:, None]
    beta = weight(tl.load(b + token * b_stride + head, mask=row < count, other=0.0), DOUBLE_BETA)
    total = tl.load(total_at[None, :] + row[:, None] * K, mask=in_k[None, :], other=0.0)
    first = tl.load(total_at + block * SUB * K, mask=in_k, other=0.0)
    shrunk = tl.exp(total - first[None, :])
    q_left, k_left = (q * shrunk).to(kind), (left * shrunk).to(kind)
    square = entry * (CHUNK * CHUNK) + row[:, None] * CHUNK + sub[None, :]
    for earlier in range(BLOCKS):
        score, system = tl.zeros((SUB, SUB), tl.float32), tl.zeros((SUB, SUB), tl.float32)
        if earlier < block:
            at = earlier * SUB + sub
            past = k_at[None, :] + (start.to(tl.int64) + at)[:, None] * mixed_stride
            k_past = tl.load(past, mask=(at < count)[:, None] & in_k[None, :], other=0.0).to(tl.float32)
            k_past *= tl.rsqrt(tl.sum(k_past * k_past, axis=1) + L2_EPS)[:, None]
            since = tl.load(total_at[None, :] + at[:, None] * K, mask=in_k[None, :], other=0.0)
            right = tl.trans((k_past * tl.exp(first[None, :] - since)).to(kind))
            score = tl.dot(q_left, right, input_precision="ieee")
            system = tl.dot(k_left, right, input_precision="ieee")
        elif earlier == block:
            for j in range(SUB):
                real = in_k & (block * SUB + j < count)
                key = tl.load(k_at + (start.to(tl.int64) + block * SUB + j) * mixed_stride, mask=real, other=0.0)
                since = tl.load(total_at + (block * SUB + j) * K, mask=in_k, other=0.0)
                # Rows before the j-th, whose exponents are positive, are cut off below.
                right = key.to(tl.float32)[None, :] * tl.exp(tl.minimum(total - since[None, :], 0.0))
                only = (sub == j)[None, :]
                score += tl.where(only, tl.sum(q * right, axis=1)[:, None], 0.0)
                system += tl.where(only, tl.sum(left * right, axis=1)[:, None], 0.0)
            score = tl.where(sub[:, None] >= sub[None, :], score * k_scale[None, :], 0.0)
            system = tl.where(sub[:, None] > sub[None, :], system * k_scale[None, :], 0.0)
        here = square + earlier * SUB
        tl.store(scores + here, score.to(kind))
        tl.store(systems + here, system * beta[:, None])


@triton.jit
def _invert_kernel(
    b,
    tiles,
    cu_seqlens,
    systems,
    inverses,
    b_stride,
    H: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One chunk of one head: `(I + systems[entry])^-1 diag(beta)` -> `inverses[entry]`, `[C, C]`."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    tile, head = pid // H, pid % H
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    kind: tl.constexpr = inverses.dtype.element_ty
    start, count, entry = chunk_place(cu_seqlens, segment, offset, head, H)
    row = tl.arange(0, CHUNK)
    beta = weight(tl.load(b + (start.to(tl.int64) + row) * b_stride + head, mask=row < count, other=0.0), DOUBLE_BETA)
    square = entry * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    inverse = unit_lower_inverse(tl.load(systems + square), kind != tl.float32)
    tl.store(inverses + square, (inverse * tl.where(row < count, beta, 0.0)[None, :]).to(kind))


def ready_chunks(
    mixed: Tensor, a: Tensor, b: Tensor, params: RecurrenceParams, index: SegmentIndex, block_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of all chunks: (inverses times beta `[entries, C, C]`, scores `[entries, C, C]`, factors of keys
    `[entries, 3, C, K]`, decays over the chunk `[entries, K]` fp32)."""
    assert index.tiles is not None, "kernels need the index's tiles"
    spec, heads, dim = params.spec, params.spec.num_v_heads, params.spec.key_dim
    entries, chunks = (mixed.shape[0] // TILE + len(index)) * heads, index.tiles.shape[0] * heads
    inverses, scores = mixed.new_empty(2, entries, TILE, TILE)
    keys = mixed.new_empty(entries, 3, TILE, dim)
    systems, totals, wholes = (
        torch.empty(entries, *shape, dtype=torch.float32, device=mixed.device)
        for shape in ((TILE, TILE), (TILE, dim), (dim,))
    )
    sizes = {"H": heads, "K": dim, "BLOCK_K": block_k, **overlap(mixed.device, mixed.shape[0]), "num_stages": 1}
    places = (index.tiles, index.cu_seqlens)
    _chunk_kernel[(chunks,)](
        mixed,
        a,
        params.A_log,
        params.dt_bias,
        *places,
        keys,
        totals,
        wholes,
        mixed.stride(0),
        a.stride(0),
        dim**-0.5,
        BOUND=spec.bound or 0.0,
        num_warps=8,
        **sizes,
    )
    strides = (mixed.stride(0), b.stride(0), dim**-0.5)
    _pair_kernel[(chunks * BLOCKS.value,)](
        mixed, b, *places, totals, systems, scores, *strides, DOUBLE_BETA=spec.double_beta, num_warps=4, **sizes
    )
    del sizes["K"], sizes["BLOCK_K"]
    _invert_kernel[(chunks,)](
        b, *places, systems, inverses, b.stride(0), DOUBLE_BETA=spec.double_beta, num_warps=4, **sizes
    )
    return inverses, scores, keys, wholes
