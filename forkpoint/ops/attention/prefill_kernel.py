"""Attention of tiles of queries in Triton. If there are too few tiles, several programs split a tile's keys."""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.attention.softmax import FEWEST_WIDENED, LOWEST, add_scores, add_values, gated, join, of_seen
from forkpoint.ops.launch import await_inputs
from forkpoint.ops.metadata import TILE

FEWEST = tl.constexpr(4)  # blocks of keys that are worth a program of their own
TOKENS = tl.constexpr(TILE)


@triton.jit
def _place(tiles, cu_queries, kv_lens, tile, sub, window, QUERIES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bounds of QUERIES queries of a tile.

    They are: row, first and last query in the row, the row's first token, tokens before the row's queries, and the
    first and end block of the keys they see. A padding tile has last <= first."""
    row, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    present = row >= 0
    row = tl.maximum(row, 0)
    start = tl.load(cu_queries + row)
    num_queries = tl.load(cu_queries + row + 1) - start
    before = tl.load(kv_lens + row) - num_queries
    first = offset + sub * QUERIES
    last = tl.minimum(tl.minimum(first + QUERIES, num_queries), offset + TOKENS)
    last = tl.where(present, last, first)
    low = 0
    if window is not None:
        low = tl.maximum(0, before + first - window + 1) // BLOCK
    return row, first, last, start, before, low, (before + last - 1) // BLOCK + 1


@triton.jit
def _share(low, end, share, num_splits):
    """Return a share of the blocks `[low, end)`: whether it is the only one, its first block and its end block.

    Late shares may be empty."""
    size = tl.maximum(FEWEST, tl.cdiv(end - low, num_splits))
    first = low + share * size
    return end - low <= size, first, tl.minimum(end, first + size)


@triton.jit
def _spots(token, token_stride, head, head_stride, at, QUERIES: tl.constexpr, WIDE: tl.constexpr):
    """Return offsets `[QUERIES, WIDE, columns]` of queries from `token` on and heads from `head` on, without
    gathers."""
    tokens, heads = token + tl.arange(0, QUERIES), head + tl.arange(0, WIDE)
    return tokens[:, None, None] * token_stride + (heads * head_stride)[None, :, None] + at[None, None, :]


@triton.jit(do_not_specialize=["num_tiles", "num_splits", "table_stride", "gate_token"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    out,
    gate,
    acc_ptr,
    l_ptr,
    m_ptr,
    tiles,
    cu_queries,
    kv_lens,
    table_rows,
    block_table,
    num_tiles,
    num_splits,
    table_stride,
    gate_token,
    q_token,
    q_head,
    k_block,
    k_head,
    v_block,
    v_head,
    scale_block,
    scale,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend with QUERIES queries of one tile and all query heads of one key head to all keys or (SPLIT) a share of
    them.

    Late tiles see the most keys and start first. Programs that share keys are adjacent. Unless there is one share, its
    sums go to the scratch, entry `(token * num_splits + share) * num_heads + head`.
    """
    await_inputs(OVERLAP)
    SUBS: tl.constexpr = (TOKENS + QUERIES - 1) // QUERIES
    LEAST: tl.constexpr = 16 if v_scales is None else FEWEST_WIDENED
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(DV) if DV > LEAST else LEAST
    pid = tl.program_id(0)
    kv_head, rest = pid % HEADS, pid // HEADS
    share, own = rest // (num_tiles * SUBS), num_tiles * SUBS - 1 - rest % (num_tiles * SUBS)
    tile, sub = own // SUBS, own % SUBS
    row, first, last, start, before, low, end = _place(tiles, cu_queries, kv_lens, tile, sub, window, QUERIES, BLOCK)
    alone = True
    if SPLIT:
        alone, low, end = _share(low, end, share, num_splits)
    kv_len = before + last
    if (first < last) & (low < end):
        m, at, at_v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        WIDE: tl.constexpr = BLOCK_M // QUERIES  # heads; with STRAIGHT, padded to a power of two
        if STRAIGHT:
            head, token = kv_head * GROUP, (start + first).to(tl.int64)
            present = (tl.arange(0, QUERIES) < last - first)[:, None] & (tl.arange(0, WIDE) < GROUP)[None, :]
            q_at = q + _spots(token, q_token, head, q_head, at, QUERIES, WIDE)
            rows = tl.load(q_at, mask=present[:, :, None] & (at < D)[None, None, :], other=0.0)
            rows = tl.reshape(rows, (BLOCK_M, BLOCK_D))
            position = before + first + m // WIDE
        else:
            query, head = first + m // GROUP, kv_head * GROUP + m % GROUP
            present = m < (last - first) * GROUP
            token = (start + query).to(tl.int64)
            q_at = q + token[:, None] * q_token + head[:, None] * q_head + at[None, :]
            rows = tl.load(q_at, mask=present[:, None] & (at < D)[None, :], other=0.0)
            position = before + query
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
        table = block_table + tl.load(table_rows + row).to(tl.int64) * table_stride
        full = low
        if window is None and not SPLIT:  # a share is too short to split its loop
            full = tl.minimum(end, tl.maximum(low, (before + first + 1) // BLOCK))
        for masked in tl.static_range(2):
            from_block, to_block = low, full
            if masked:
                from_block, to_block = full, end
            for j in range(from_block, to_block):
                block = tl.load(table + j).to(tl.int64)
                key_scales, value_scales = k_scales, v_scales
                if k_scales is not None:
                    scales_at = block * scale_block + kv_head * BLOCK
                    key_scales, value_scales = k_scales + scales_at, v_scales + scales_at
                keys_at = k_cache + block * k_block + kv_head * k_head
                values_at = v_cache + block * v_block + kv_head * v_head
                first_key, key = j * BLOCK, tl.arange(0, BLOCK)
                keys_at = keys_at + key[None, :] * D + at[:, None]
                values_at = values_at + key[:, None] * DV + at_v[None, :]
                scores = add_scores(None, rows, keys_at, key_scales, D)
                if masked:
                    scores = of_seen(scores, position, first_key, window, 0)
                acc, l_i, m_i = add_values(
                    acc, l_i, m_i, scores, scale, values_at, value_scales, first_key, kv_len, rows.dtype, DV, masked
                )
        if STRAIGHT:
            inside = present[:, :, None] & (at_v < DV)[None, None, :]
        else:
            inside = present[:, None] & (at_v < DV)[None, :]
        if alone:
            answer = acc / l_i[:, None]
            if STRAIGHT:
                answer = tl.reshape(answer, (QUERIES, WIDE, BLOCK_DV))
            if gate is not None:
                if STRAIGHT:
                    gate_at = gate + _spots(token, gate_token, head, DV, at_v, QUERIES, WIDE)
                else:
                    gate_at = gate + token[:, None] * gate_token + head[:, None] * DV + at_v[None, :]
                answer = gated(answer, tl.load(gate_at, mask=inside, other=0.0))
            if STRAIGHT:
                out_at = out + _spots(token, HEADS * GROUP * DV, head, DV, at_v, QUERIES, WIDE)
            else:
                out_at = out + (token * (HEADS * GROUP) + head)[:, None] * DV + at_v[None, :]
            tl.store(out_at, answer.to(out.dtype.element_ty), mask=inside)
        elif STRAIGHT:
            each = num_splits * (HEADS * GROUP)
            entry = token * each + share * (HEADS * GROUP) + head
            spots = entry + tl.arange(0, QUERIES)[:, None] * each + tl.arange(0, WIDE)[None, :]
            acc_at = acc_ptr + entry * DV + _spots(0, each * DV, 0, DV, at_v, QUERIES, WIDE)
            tl.store(acc_at, tl.reshape(acc, (QUERIES, WIDE, BLOCK_DV)), mask=inside)
            tl.store(l_ptr + spots, tl.reshape(l_i, (QUERIES, WIDE)), mask=present)
            tl.store(m_ptr + spots, tl.reshape(m_i, (QUERIES, WIDE)), mask=present)
        else:
            entry = (token * num_splits + share) * (HEADS * GROUP) + head
            tl.store(acc_ptr + entry[:, None] * DV + at_v[None, :], acc, mask=inside)
            tl.store(l_ptr + entry, l_i, mask=present)
            tl.store(m_ptr + entry, m_i, mask=present)


@triton.jit(do_not_specialize=["num_splits", "gate_token"])
def join_kernel(
    acc_ptr,
    l_ptr,
    m_ptr,
    out,
    gate,
    part_ptr,
    lead,
    tiles,
    cu_queries,
    kv_lens,
    num_splits,
    gate_token,
    window,
    HEADS: tl.constexpr,
    FOLDED: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the sums of one query head of one query: a decode row's parts (without `tiles`), or the shares of a tile.

    A row without parts gets zeros."""
    within, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    if tiles is None:
        own = tl.load(lead + within) if FOLDED > 1 else within
        begin, end = tl.load(part_ptr + own), tl.load(part_ptr + own + 1)
        await_inputs(OVERLAP)
        token, count, several = within.to(tl.int64), end - begin, end - begin != 1
        entry = begin.to(tl.int64) * FOLDED + within - own
    else:
        await_inputs(OVERLAP)
        tile, query = within // TOKENS, within % TOKENS
        sub = query // QUERIES
        _, first, last, start, _, low, end = _place(tiles, cu_queries, kv_lens, tile, sub, window, QUERIES, BLOCK)
        size = tl.maximum(FEWEST, tl.cdiv(end - low, num_splits))
        query = first + query % QUERIES
        token = (start + query).to(tl.int64)
        entry = token * num_splits
        count, several = tl.cdiv(end - low, size), (query < last) & (end - low > size)
    if several:
        BLOCK_DV: tl.constexpr = triton.next_power_of_2(DV) if DV > 16 else 16
        at = tl.arange(0, BLOCK_DV)
        answer = join(acc_ptr, l_ptr, m_ptr, entry * HEADS + head, count, FOLDED * HEADS, at, DV)
        if gate is not None:
            gate_at = gate + token * gate_token + head * DV + at
            answer = gated(answer, tl.load(gate_at, mask=at < DV, other=0.0))
        tl.store(out + (token * HEADS + head) * DV + at, answer.to(out.dtype.element_ty), mask=at < DV)
