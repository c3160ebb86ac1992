"""Paged attention in Triton over 64-token blocks, and the write of keys and values.

Query rows of one key head are the rows of one product (GQA). Prefill takes tiles of queries; decode splits the keys
by absolute position and puts the parts together in a second launch. A block of keys that a query does not see leaves
its sums as they are, bit for bit, so that a row's result depends on its own position and keys alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.metadata import TILE, AttentionIndex

SPLIT = 4  # blocks of keys that one decode program reads
PARTS = 8  # that the combining program adds at once
LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)  # below any score, and finite: a row that has seen nothing stays free of NaN


@triton.jit
def _write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_token,
    k_head,
    v_token,
    v_head,
    k_block,
    kc_head,
    v_block,
    vc_head,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block, offset = slot // BLOCK, slot % BLOCK
        head, at, at_v = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        inside = (head < HEADS)[:, None] & (at < D)[None, :]
        value = tl.load(k + token * k_token + head[:, None] * k_head + at[None, :], mask=inside, other=0.0)
        place = k_cache + block * k_block + offset * D + head[:, None] * kc_head + at[None, :]
        tl.store(place, value.to(k_cache.dtype.element_ty), mask=inside)
        inside = (head < HEADS)[:, None] & (at_v < DV)[None, :]
        value = tl.load(v + token * v_token + head[:, None] * v_head + at_v[None, :], mask=inside, other=0.0)
        place = v_cache + block * v_block + offset * DV + head[:, None] * vc_head + at_v[None, :]
        tl.store(place, value.to(v_cache.dtype.element_ty), mask=inside)


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    assert k_cache[0, 0].is_contiguous() and v_cache[0, 0].is_contiguous(), "a head's share of a block must be dense"


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store `k[T, Hkv, D]`, `v[T, Hkv, Dv]` in `[P, Hkv, block_size, D]` caches; slot -1 is skipped."""
    _check_caches(k_cache, v_cache)
    heads, dim, value_dim = k.shape[1], k.shape[2], v.shape[2]
    if k.shape[0]:
        _write_kernel[(k.shape[0],)](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            BLOCK=k_cache.shape[2],
            HEADS=heads,
            D=dim,
            DV=value_dim,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_DV=triton.next_power_of_2(value_dim),
            num_warps=2,
        )


@triton.jit
def _see(
    q,
    total,
    weight,
    top,
    key_at,
    value_at,
    first_key,
    position,
    kv_len,
    scale,
    window,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Add one block of keys to the running (weighted values, sum of weights, largest score) of query rows.

    `position[M]` are the rows' absolute positions, `scale` includes log2(e). MASKED blocks hold keys that some row
    does not see, or that were never stored.
    """
    key, at, at_v = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    inside = first_key + key < kv_len
    keys = tl.load(key_at + key[None, :] * D + at[:, None], mask=(at < D)[:, None] & inside[None, :], other=0.0)
    scores = tl.dot(q, keys, input_precision="ieee") * scale
    if MASKED:
        back = position[:, None] - (first_key + key)[None, :]
        seen = back >= 0
        if HAS_WINDOW:
            seen = seen & (back < window)
        scores = tl.where(seen, scores, float("-inf"))
    high = tl.maximum(top, tl.max(scores, axis=1))
    parts = tl.exp2(scores - high[:, None])
    shrink = tl.exp2(top - high)
    weight = weight * shrink + tl.sum(parts, axis=1)
    values = tl.load(
        value_at + key[:, None] * DV + at_v[None, :], mask=inside[:, None] & (at_v < DV)[None, :], other=0.0
    )
    total = total * shrink[:, None]
    total += tl.dot(parts.to(values.dtype), values, input_precision="ieee")
    return total, weight, high


@triton.jit(do_not_specialize=["num_tiles", "table_stride"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tiles,
    cu_queries,
    kv_lens,
    block_table,
    table_stride,
    q_token,
    q_head,
    k_block,
    k_head,
    v_block,
    v_head,
    scale,
    window,
    num_tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr,
    SUBS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """QUERIES queries of one tile, all heads of one key head. Late tiles, which see the most keys, start first."""
    pid = tl.program_id(0)
    kv_head = pid % HEADS
    part = num_tiles * SUBS - 1 - pid // HEADS
    tile = part // SUBS
    row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1) + (part % SUBS) * QUERIES
    start = tl.load(cu_queries + row)
    num_queries = tl.load(cu_queries + row + 1) - start
    kv_len = tl.load(kv_lens + row)
    last = tl.minimum(tl.minimum(first + QUERIES, num_queries), tl.load(tiles + 2 * tile + 1) + TOKENS)
    if first < last:
        m, at, at_v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        query, head = first + m // GROUP, kv_head * GROUP + m % GROUP
        present = m < (last - first) * GROUP
        token = (start + query).to(tl.int64)
        q_at = q + token[:, None] * q_token + head[:, None] * q_head + at[None, :]
        rows = tl.load(q_at, mask=present[:, None] & (at < D)[None, :], other=0.0)
        before = kv_len - num_queries
        position = before + query
        total = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), LOWEST, tl.float32)
        table = block_table + row.to(tl.int64) * table_stride
        low, full = 0, (before + first + 1) // BLOCK
        if HAS_WINDOW:
            low = tl.maximum(0, before + first - window + 1) // BLOCK
            full = low
        for masked in tl.static_range(2):
            begin, end = low, full
            if masked:
                begin, end = full, (before + last - 1) // BLOCK + 1
            for j in range(begin, end):
                block = tl.load(table + j).to(tl.int64)
                total, weight, top = _see(
                    rows,
                    total,
                    weight,
                    top,
                    k_cache + block * k_block + kv_head * k_head,
                    v_cache + block * v_block + kv_head * v_head,
                    j * BLOCK,
                    position,
                    kv_len,
                    scale,
                    window,
                    D,
                    DV,
                    BLOCK,
                    BLOCK_D,
                    BLOCK_DV,
                    masked,
                    HAS_WINDOW,
                )
        answer = total / weight[:, None]
        out_at = out + (token * (HEADS * GROUP) + head)[:, None] * DV + at_v[None, :]
        tl.store(out_at, answer.to(out.dtype.element_ty), mask=present[:, None] & (at_v < DV)[None, :])


@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    totals,
    weights,
    tops,
    kv_lens,
    block_table,
    table_stride,
    q_token,
    q_head,
    k_block,
    k_head,
    v_block,
    v_head,
    scale,
    window,
    num_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One row's query, the heads of one key head, over SPLIT blocks; leaves what `_combine_kernel` puts together."""
    pid = tl.program_id(0)
    split = pid % num_splits
    kv_head = (pid // num_splits) % HEADS
    row = pid // (num_splits * HEADS)
    kv_len = tl.load(kv_lens + row)
    low = split * SPLIT
    if HAS_WINDOW:
        low = tl.maximum(low, tl.maximum(0, kv_len - window) // BLOCK)
    high = tl.minimum((split + 1) * SPLIT, tl.cdiv(kv_len, BLOCK))
    if low < high:
        m, at, at_v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        head = kv_head * GROUP + m
        inside = (m < GROUP)[:, None] & (at < D)[None, :]
        q_at = q + row.to(tl.int64) * q_token + head[:, None] * q_head + at[None, :]
        rows = tl.load(q_at, mask=inside, other=0.0)
        position = tl.zeros((BLOCK_M,), tl.int32) + kv_len - 1
        total = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), LOWEST, tl.float32)
        table = block_table + row.to(tl.int64) * table_stride
        for j in range(low, high):
            block = tl.load(table + j).to(tl.int64)
            total, weight, top = _see(
                rows,
                total,
                weight,
                top,
                k_cache + block * k_block + kv_head * k_head,
                v_cache + block * v_block + kv_head * v_head,
                j * BLOCK,
                position,
                kv_len,
                scale,
                window,
                D,
                DV,
                BLOCK,
                BLOCK_D,
                BLOCK_DV,
                True,
                HAS_WINDOW,
            )
        entry = (row.to(tl.int64) * (HEADS * GROUP) + head) * num_splits + split
        tl.store(totals + entry[:, None] * DV + at_v[None, :], total, mask=(m < GROUP)[:, None] & (at_v < DV)[None, :])
        tl.store(weights + entry, weight, mask=m < GROUP)
        tl.store(tops + entry, top, mask=m < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    totals,
    weights,
    tops,
    out,
    kv_lens,
    window,
    num_splits,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Puts the parts of one head of one row together, in the order of their positions."""
    pid = tl.program_id(0).to(tl.int64)
    kv_len = tl.load(kv_lens + pid // HEADS)
    at = tl.arange(0, BLOCK_DV)
    total = tl.zeros((BLOCK_DV,), tl.float32)
    weight, top = 0.0, -1.0e30
    low, end = 0, tl.cdiv(tl.cdiv(kv_len, BLOCK), SPLIT)
    if HAS_WINDOW:
        low = tl.maximum(0, kv_len - window) // BLOCK // SPLIT
    for first in range(low // PARTS * PARTS, end, PARTS):
        split = first + tl.arange(0, PARTS)
        present = (split >= low) & (split < end)
        entry = pid * num_splits + split
        own = tl.load(tops + entry, mask=present, other=-1.0e30)
        high = tl.maximum(top, tl.max(own, axis=0))
        shrink, share = tl.exp2(top - high), tl.exp2(own - high)
        mask = present[:, None] & (at < DV)[None, :]
        parts = tl.load(totals + entry[:, None] * DV + at[None, :], mask=mask, other=0.0)
        total = total * shrink + tl.sum(parts * share[:, None], axis=0)
        weight = weight * shrink + tl.sum(tl.load(weights + entry, mask=present, other=0.0) * share, axis=0)
        top = high
    tl.store(out + pid * DV + at, (total / weight).to(out.dtype.element_ty), mask=at < DV)


def _decode(q: Tensor, out: Tensor, index: AttentionIndex, shared: list[Any], sizes: dict[str, Any]) -> None:
    rows, heads = index.num_decodes, q.shape[1]
    num_splits = triton.cdiv(max(index.host_kv_lens[:rows]), SPLIT * sizes["BLOCK"])
    totals = torch.empty(rows * heads * num_splits, sizes["DV"], dtype=torch.float32, device=q.device)
    weights, tops = torch.empty(2, len(totals), dtype=torch.float32, device=q.device)
    k_cache, v_cache, strides, scale, window = shared
    _decode_kernel[(rows * sizes["HEADS"] * num_splits,)](
        q,
        k_cache,
        v_cache,
        totals,
        weights,
        tops,
        index.kv_lens,
        index.block_table,
        *strides,
        scale,
        window,
        num_splits,
        **sizes,
        BLOCK_M=max(16, triton.next_power_of_2(sizes["GROUP"])),
        SPLIT=SPLIT,
        num_warps=4,
        num_stages=2 if q.dtype != torch.float32 else 1,
    )
    _combine_kernel[(rows * heads,)](
        totals,
        weights,
        tops,
        out,
        index.kv_lens,
        window,
        num_splits,
        HEADS=heads,
        DV=sizes["DV"],
        BLOCK=sizes["BLOCK"],
        BLOCK_DV=sizes["BLOCK_DV"],
        SPLIT=SPLIT,
        PARTS=PARTS,
        HAS_WINDOW=sizes["HAS_WINDOW"],
        num_warps=2,
    )


def _prefill(q: Tensor, out: Tensor, index: AttentionIndex, shared: list[Any], sizes: dict[str, Any]) -> None:
    group, wide = sizes["GROUP"], q.dtype == torch.float32
    block_m = max(16, min(64 if wide else 128, triton.next_power_of_2(TILE * group)))
    queries = min(TILE, block_m // group)
    subs = triton.cdiv(TILE, queries)
    k_cache, v_cache, strides, scale, window = shared
    _prefill_kernel[(len(index.tiles) * subs * sizes["HEADS"],)](
        q,
        k_cache,
        v_cache,
        out,
        index.tiles,
        index.cu_queries,
        index.kv_lens,
        index.block_table,
        *strides,
        scale,
        window,
        len(index.tiles),
        **sizes,
        BLOCK_M=block_m,
        QUERIES=queries,
        SUBS=subs,
        TOKENS=TILE,
        num_warps=8 if block_m == 128 or wide else 4,
        num_stages=1 if wide else 2,
    )


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, index: AttentionIndex, scale: float, window: int | None
) -> Tensor:
    """Causal attention of `q[T, Hq, D]` over the rows' blocks -> `[T, Hq, Dv]`; `Hq / Hkv` at most 64."""
    _check_caches(k_cache, v_cache)
    assert q.stride(2) == 1 and index.block_table.stride(1) == 1
    kv_heads, block, dim, value_dim = *k_cache.shape[1:], v_cache.shape[3]
    out = q.new_empty(q.shape[0], q.shape[1], value_dim)
    sizes = {
        "HEADS": kv_heads,
        "GROUP": q.shape[1] // kv_heads,
        "D": dim,
        "DV": value_dim,
        "BLOCK": block,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "HAS_WINDOW": window is not None,
    }
    strides = (index.block_table.stride(0), *q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2])
    shared = [k_cache, v_cache, strides, scale * LOG2_E, window or 0]
    if index.num_decodes:
        _decode(q, out, index, shared, sizes)
    if index.num_decodes < len(index.query_lens):
        _prefill(q, out, index, shared, sizes)
    return out
