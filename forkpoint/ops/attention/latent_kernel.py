"""Attention over latents in Triton. All heads share one key of R + P dims per token, and its first R dims are the
value.

The columns of a product are (query, head) pairs, and its rows are keys or value dims, so that models with few heads
still fill the matrix units. Keys are loaded as R and P dims separately, because R + P is not a power of two. A loaded
latent serves both scores and sums. Decode rows are computed in parts, which `join_kernel` joins. Tiles of queries see
all their keys in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.attention.prefill_kernel import TOKENS, _place, _share, _spots
from forkpoint.ops.attention.softmax import LOWEST
from forkpoint.ops.launch import await_inputs, overlap


@triton.jit(do_not_specialize=["num_decodes", "num_tiles", "num_splits", "table_stride"])
def latent_kernel(
    q,
    cache,
    out,
    acc_ptr,
    l_ptr,
    m_ptr,
    items,
    part_ptr,
    cu_queries,
    kv_lens,
    table_rows,
    block_table,
    num_decodes,
    num_tiles,
    num_splits,
    table_stride,
    q_token,
    q_head,
    block_stride,
    scale,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERIES: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
    FIRST: tl.constexpr = 0,
    PARTIAL: tl.constexpr = False,
):
    """Attend to one part of a decode row, or with QUERIES queries of a tile to all its keys or (SPLIT) a share of them.

    `items` are parts (see `KeySplits`), one per program, or tiles, each for SUBS programs (times the shares). If a
    query has several sums, or PARTIAL ones, they go to the scratch: a part's to its line, a share's as in
    `prefill_kernel`. Decode rows see no keys before FIRST."""
    await_inputs(OVERLAP)
    BLOCK_R: tl.constexpr = triton.next_power_of_2(R) if R > 16 else 16
    BLOCK_P: tl.constexpr = triton.next_power_of_2(P) if P > 16 else 16
    SUBS: tl.constexpr = (TOKENS + QUERIES - 1) // QUERIES
    pid, m = tl.program_id(0), tl.arange(0, BLOCK_M)
    if DECODE:
        if pid >= tl.load(part_ptr + num_decodes):
            return
        row, low, end = tl.load(items + 3 * pid), tl.load(items + 3 * pid + 1), tl.load(items + 3 * pid + 2)
        kv_len = tl.load(kv_lens + row)
        alone = (tl.load(part_ptr + row + 1) - tl.load(part_ptr + row) == 1) & (not PARTIAL)
        head, present, token, position = m, m < HEADS, m * 0 + row, m * 0 + kv_len - 1
    else:
        share, own = pid // (num_tiles * SUBS), pid % (num_tiles * SUBS)
        row, first, last, start, before, low, end = _place(
            items, cu_queries, kv_lens, own // SUBS, own % SUBS, None, QUERIES, BLOCK
        )
        alone = True
        if SPLIT:
            alone, low, end = _share(low, end, share, num_splits)
        if (first >= last) | (low >= end):
            return
        kv_len = before + last
        WIDE: tl.constexpr = BLOCK_M // QUERIES if STRAIGHT else HEADS
        head, present = m % WIDE, m < (last - first) * WIDE
        token, position = start + first + m // WIDE, before + first + m // WIDE
    key, r, p = tl.arange(0, KEYS), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    if STRAIGHT and not DECODE:
        q_at = q + (start + first).to(tl.int64) * q_token
        rows = (tl.arange(0, QUERIES) < last - first)[:, None] & (tl.arange(0, WIDE) < HEADS)[None, :]
        there = rows[:, :, None]
        q_latent_at = q_at + _spots(0, q_token, 0, q_head, r, QUERIES, WIDE)
        q_rope_at = q_at + R + _spots(0, q_token, 0, q_head, p, QUERIES, WIDE)
        q_latent = tl.load(q_latent_at, mask=there & (r < R)[None, None, :], other=0.0)
        q_rope = tl.load(q_rope_at, mask=there & (p < P)[None, None, :], other=0.0)
        q_latent = tl.trans(tl.reshape(q_latent, (BLOCK_M, BLOCK_R)))
        q_rope = tl.trans(tl.reshape(q_rope, (BLOCK_M, BLOCK_P)))
    else:
        q_at = q + token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head
        q_latent = tl.trans(tl.load(q_at + r[None, :], mask=present[:, None] & (r < R)[None, :], other=0.0))
        q_rope = tl.trans(tl.load(q_at + R + p[None, :], mask=present[:, None] & (p < P)[None, :], other=0.0))
    acc = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    table = block_table + tl.load(table_rows + row).to(tl.int64) * table_stride
    PIECES: tl.constexpr = BLOCK // KEYS
    for j in range(low * PIECES, tl.minimum(end * PIECES, tl.cdiv(kv_len, KEYS))):
        at = cache + tl.load(table + j // PIECES).to(tl.int64) * block_stride
        at += (j % PIECES * KEYS + key)[:, None] * (R + P)
        stored = (j * KEYS + key < kv_len)[:, None]
        latent = tl.load(at + r[None, :], mask=stored & (r < R)[None, :], other=0.0)
        rope = tl.load(at + R + p[None, :], mask=stored & (p < P)[None, :], other=0.0)
        scores = tl.dot(latent, q_latent, input_precision="ieee")
        scores = tl.dot(rope, q_rope, scores, input_precision="ieee")
        seen = position[None, :] >= (j * KEYS + key)[:, None]
        if FIRST:
            seen = seen & (j * KEYS + key >= FIRST)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=0) * scale)
        weights, alpha = tl.exp2(scores * scale - m_new[None, :]), tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(weights, axis=0)
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc * alpha[None, :], input_precision="ieee")
        m_i = m_new
    if STRAIGHT and not DECODE:
        inside = there & (r < R)[None, None, :]
        if alone:
            out_at = out + (start + first).to(tl.int64) * (HEADS * R) + _spots(0, HEADS * R, 0, R, r, QUERIES, WIDE)
            answer = tl.reshape(tl.trans(acc / l_i[None, :]), (QUERIES, WIDE, BLOCK_R))
            tl.store(out_at, answer.to(out.dtype.element_ty), mask=inside)
        else:
            each = num_splits * HEADS
            entry = (start + first).to(tl.int64) * each + share * HEADS
            spots = entry + tl.arange(0, QUERIES)[:, None] * each + tl.arange(0, WIDE)[None, :]
            acc_at = acc_ptr + entry * R + _spots(0, each * R, 0, R, r, QUERIES, WIDE)
            tl.store(acc_at, tl.reshape(tl.trans(acc), (QUERIES, WIDE, BLOCK_R)), mask=inside)
            tl.store(l_ptr + spots, tl.reshape(l_i, (QUERIES, WIDE)), mask=rows)
            tl.store(m_ptr + spots, tl.reshape(m_i, (QUERIES, WIDE)), mask=rows)
        return
    inside = present[:, None] & (r < R)[None, :]
    if alone:
        out_at = out + (token.to(tl.int64) * HEADS + head)[:, None] * R + r[None, :]
        tl.store(out_at, tl.trans(acc / l_i[None, :]).to(out.dtype.element_ty), mask=inside)
    else:
        entry = pid.to(tl.int64) * HEADS + head
        if SPLIT:
            entry = (token.to(tl.int64) * num_splits + share) * HEADS + head
        tl.store(acc_ptr + entry[:, None] * R + r[None, :], tl.trans(acc), mask=inside)
        tl.store(l_ptr + entry, l_i, mask=present)
        tl.store(m_ptr + entry, m_i, mask=present)


@triton.jit
def _rotated(at, out_at, angle, mask, low, HALF: tl.constexpr):
    """Rotate rows `at` and store them to rows `out_at`. `low` are the columns of the first half."""
    cos, sin = tl.load(angle + low, mask=low < HALF, other=0.0), tl.load(angle + HALF + low, mask=low < HALF, other=0.0)
    first = tl.load(at + low[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + low[None, :], mask=mask, other=0.0).to(tl.float32)
    dtype = out_at.dtype.element_ty
    tl.store(out_at + low[None, :], (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=mask)
    tl.store(out_at + HALF + low[None, :], (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=mask)


@triton.jit
def _write_kernel(
    q_rope,
    latent,
    weight,
    cos_sin,
    positions,
    cache,
    key_places,
    out,
    eps,
    q_token,
    q_head,
    latent_stride,
    block_stride,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one token: store its normalised latent and rotated key in the cache, and its rotated queries in `out`."""
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    angle = cos_sin + tl.load(positions + token) * P
    HALF: tl.constexpr = P // 2
    BLOCK_P: tl.constexpr = triton.next_power_of_2(P)
    low = tl.arange(0, BLOCK_P // 2)
    if ROTATED:
        head = tl.arange(0, triton.next_power_of_2(HEADS))
        mask = (head < HEADS)[:, None] & (low < HALF)[None, :]
        q_at = q_rope + token * q_token + (head * q_head)[:, None]
        _rotated(q_at, out + ((token * HEADS + head) * P)[:, None], angle, mask, low, HALF)
    key_place = tl.load(key_places + token)
    if key_place >= 0:
        r = tl.arange(0, triton.next_power_of_2(R))
        at = latent + token * latent_stride
        place = cache + key_place // BLOCK * block_stride + key_place % BLOCK * (R + P)
        x = tl.load(at + r, mask=r < R, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / R + eps) * tl.load(weight + r, mask=r < R, other=0.0)
        tl.store(place + r, x.to(cache.dtype.element_ty), mask=r < R)
        if ROTATED:
            one = tl.arange(0, 1)[:, None]
            _rotated(at + R + one, place + R + one, angle, (one < 1) & (low < HALF)[None, :], low, HALF)
        else:
            p = tl.arange(0, BLOCK_P)
            tl.store(place + R + p, tl.load(at + R + p, mask=p < P, other=0.0), mask=p < P)


def latent_write(
    q_rope: Tensor,
    latent: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor | None,
    positions: Tensor,
    cache: Tensor,
    key_places: Tensor,
) -> Tensor:
    """Normalise and rotate latents, store them in the cache, return the rotated q (`table.LatentWrite`)."""
    assert latent.stride(1) == 1 and q_rope.stride(2) == 1 and cache[0, 0].is_contiguous(), "rows must be dense"
    tokens, heads, dim = q_rope.shape
    rank = weight.shape[0]
    out = q_rope if cos_sin is None else q_rope.new_empty(q_rope.shape)
    if tokens:
        angles = latent if cos_sin is None else cos_sin
        operands = (q_rope, latent, weight, angles, positions, cache, key_places, out)
        strides = (*q_rope.stride()[:2], latent.stride(0), cache.stride(0))
        sizes = {"HEADS": heads, "R": rank, "P": dim, "BLOCK": cache.shape[2]}
        options = {"ROTATED": cos_sin is not None, "num_warps": 4, **overlap(latent.device, tokens)}
        _write_kernel[(tokens,)](*operands, eps, *strides, **sizes, **options)
    return out
