"""Attention of rows with one query: each part of a row's keys by itself, then the parts put together."""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.attention.softmax import LOWEST, gated, join, see


@triton.jit(do_not_specialize=["num_decodes", "table_stride"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    totals,
    weights,
    tops,
    parts,
    part_ptr,
    kv_lens,
    table_rows,
    block_table,
    num_decodes,
    table_stride,
    q_token,
    q_head,
    k_block,
    k_head,
    v_block,
    v_head,
    scale,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Programs take turns over (part, key head); the sums of a part's query heads go to its line of the scratch."""
    m, at, at_v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    num_items = tl.load(part_ptr + num_decodes) * HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part, kv_head = item // HEADS, item % HEADS
        row = tl.load(parts + 3 * part)
        low, end = tl.load(parts + 3 * part + 1), tl.load(parts + 3 * part + 2)
        kv_len, line = tl.load(kv_lens + row), tl.load(table_rows + row)
        if HAS_WINDOW:
            low = tl.maximum(low, tl.maximum(0, kv_len - window) // BLOCK)
        head = kv_head * GROUP + m
        q_at = q + row.to(tl.int64) * q_token + head[:, None] * q_head + at[None, :]
        rows = tl.load(q_at, mask=(m < GROUP)[:, None] & (at < D)[None, :], other=0.0)
        position = tl.zeros((BLOCK_M,), tl.int32) + kv_len - 1
        total = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), LOWEST, tl.float32)
        table = block_table + line.to(tl.int64) * table_stride
        for j in range(low, end):
            block = tl.load(table + j).to(tl.int64)
            total, weight, top = see(
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
        entry = (part * (HEADS * GROUP) + head).to(tl.int64)
        tl.store(totals + entry[:, None] * DV + at_v[None, :], total, mask=(m < GROUP)[:, None] & (at_v < DV)[None, :])
        tl.store(weights + entry, weight, mask=m < GROUP)
        tl.store(tops + entry, top, mask=m < GROUP)


@triton.jit(do_not_specialize=["gate_token"])
def combine_kernel(
    totals,
    weights,
    tops,
    part_ptr,
    out,
    gate,
    gate_token,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
):
    """One query head of one row; a row without parts gives zeros."""
    pid, at = tl.program_id(0), tl.arange(0, BLOCK_DV)
    row, head = pid // HEADS, pid % HEADS
    if GATED:  # read early, beside the parts
        gate_at = gate + row.to(tl.int64) * gate_token + head * DV + at
        factor = tl.load(gate_at, mask=at < DV, other=0.0)
    begin, end = tl.load(part_ptr + row), tl.load(part_ptr + row + 1)
    first = begin.to(tl.int64) * HEADS + head
    answer = join(totals, weights, tops, first, end - begin, HEADS, at, DV, PARTS)
    if GATED:
        answer = gated(answer, factor)
    tl.store(out + pid.to(tl.int64) * DV + at, answer.to(out.dtype.element_ty), mask=at < DV)
