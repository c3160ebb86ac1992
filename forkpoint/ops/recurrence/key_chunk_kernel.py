"""Chunks of the delta rule with a decay for each key (KDA) made ready for `key_kernel.py`, in Triton.

Decays stand inside the products of keys. In the first launch a row's decay to a key is the product of one that ends and
one that starts at the first row of the row's 16. Keys before those have no positive exponent. Keys of the same 16 rows
have, and decays are not bounded: where they are so strong that the exponent would be large, each pair of such rows has
its own exponential. The second launch inverts the chunk's system.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.launch_table import turns
from forkpoint.ops.metadata import TILE, SegmentIndex
from forkpoint.ops.recurrence.gates import L2_EPS, key_decay, weight
from forkpoint.ops.recurrence.solve import BLOCKS, CHUNK, SUB, chunk_place, unit_lower_inverse
from forkpoint.ops.table import RecurrenceParams

WIDEST, WIDEST_HALF = 60.0, 8.0  # the largest exponent whose power bfloat16 and fp32 hold, and float16
CHUNK_WARPS = 8


@triton.jit
def _chunk_kernel(
    mixed,
    a,
    b,
    a_log,
    dt_bias,
    tiles,
    cu_seqlens,
    keys,
    wholes,
    systems,
    scores,
    mixed_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    BOUND: tl.constexpr,
    WIDEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One chunk of one head: `keys[entry]`, the factors of `S k`, `S q` and of the state's update, `[3, C, K]`, and of
    rows i and j `sum_d x_id k_jd e^{total_id - total_jd}`, for x = q where i >= j, else 0 -> `scores`, for x = beta k
    where i > j, else 0 -> fp32 `systems`, both `[entries, C, C]`. `total` are sums of logs of decays up to each row."""
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
    q_at = mixed + token[:, None] * mixed_stride + (head * K + col)[None, :]
    k = tl.load(q_at + H * K, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    beta = weight(tl.load(b + token * b_stride + head, mask=row < count, other=0.0), DOUBLE_BETA)
    g = tl.where(inside, key_decay(raw, tl.load(a_log + head), bias[None, :], BOUND), 0.0)
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + L2_EPS)[:, None]
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + L2_EPS) * scale)[:, None]
    total, last = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
    tl.store(wholes + entry * K + col, tl.exp(last), mask=col < K)
    in_keys = (col < K)[None, :] & (row >= 0)[:, None]
    key_at = keys + entry * (3 * CHUNK * K) + row[:, None] * K + col[None, :]
    grown = tl.exp(total)
    tl.store(key_at, (k * grown).to(kind), mask=in_keys)
    tl.store(key_at + CHUNK * K, (q * grown).to(kind), mask=in_keys)
    tl.store(key_at + 2 * CHUNK * K, (k * tl.exp(last[None, :] - total)).to(kind), mask=in_keys)
    firsts, widest = tl.zeros((CHUNK, BLOCK_K), tl.float32), 0.0
    for i in range(BLOCKS):
        first = tl.sum(tl.where((row <= i * SUB)[:, None], g, 0.0), axis=0)
        end = tl.sum(tl.where((row < i * SUB + SUB)[:, None], g, 0.0), axis=0)
        firsts = tl.where((row // SUB == i)[:, None], first[None, :], firsts)
        widest = tl.maximum(widest, tl.max(first - end, axis=0))
    shrunk = tl.exp(total - firsts)
    q_left, k_left = (q * shrunk).to(kind), (k * shrunk).to(kind)
    score, system = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for i in range(BLOCKS):
        # Rows of the i-th block; what is cut short lies in columns of later ones, or in its own where they are wide.
        first = tl.sum(tl.where((row <= i * SUB)[:, None], g, 0.0), axis=0)
        right = tl.trans((k * tl.exp(tl.minimum(first[None, :] - total, WIDEST))).to(kind))
        mine = (row // SUB == i)[:, None]
        score = tl.where(mine, tl.dot(q_left, right, input_precision="ieee"), score)
        system = tl.where(mine, tl.dot(k_left, right, input_precision="ieee"), system)
    if widest > WIDEST:
        for j in range(SUB):
            # The j-th rows of all blocks with the rows of their own blocks.
            key, since = tl.zeros((CHUNK, BLOCK_K), tl.float32), tl.zeros((CHUNK, BLOCK_K), tl.float32)
            for i in range(BLOCKS):
                only, mine = (row == i * SUB + j)[:, None], (row // SUB == i)[:, None]
                key = tl.where(mine, tl.sum(tl.where(only, k, 0.0), axis=0)[None, :], key)
                since = tl.where(mine, tl.sum(tl.where(only, total, 0.0), axis=0)[None, :], since)
            right = key * tl.exp(tl.minimum(total - since, 0.0))
            there = (row // SUB * SUB + j)[:, None] == row[None, :]
            score = tl.where(there, tl.sum(q * right, axis=1)[:, None], score)
            system = tl.where(there, tl.sum(k * right, axis=1)[:, None], system)
    square = entry * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    tl.store(scores + square, tl.where(row[:, None] >= row[None, :], score, 0.0).to(kind))
    tl.store(systems + square, tl.where(row[:, None] > row[None, :], system * beta[:, None], 0.0))


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
    entries = (mixed.shape[0] // TILE + len(index)) * heads
    inverses, scores = mixed.new_empty(2, entries, TILE, TILE)
    keys = mixed.new_empty(entries, 3, TILE, dim)
    systems, wholes = (
        torch.empty(entries, *shape, dtype=torch.float32, device=mixed.device) for shape in ((TILE, TILE), (dim,))
    )
    options = {"H": heads, "DOUBLE_BETA": spec.double_beta, **overlap(mixed.device, mixed.shape[0]), "num_stages": 1}
    for tiles in turns(index.tiles, heads):
        _chunk_kernel[(tiles.shape[0] * heads,)](
            mixed,
            a,
            b,
            params.A_log,
            params.dt_bias,
            tiles,
            index.cu_seqlens,
            keys,
            wholes,
            systems,
            scores,
            *(x.stride(0) for x in (mixed, a, b)),
            dim**-0.5,
            K=dim,
            BLOCK_K=block_k,
            BOUND=spec.bound or 0.0,
            WIDEST=WIDEST_HALF if mixed.dtype == torch.float16 else WIDEST,
            num_warps=CHUNK_WARPS,
            **options,
        )
        _invert_kernel[(tiles.shape[0] * heads,)](
            b, tiles, index.cu_seqlens, systems, inverses, b.stride(0), num_warps=4, **options
        )
    return inverses, scores, keys, wholes
