"""Attention of rows with one query. Each part of a row's keys is attended to separately and joined in another launch.
A row with one part needs no second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.attention.softmax import FEWEST_WIDENED, LOWEST, add_scores, add_values, gated, of_seen
from forkpoint.ops.launch import await_inputs


@triton.jit(do_not_specialize=["num_decodes", "table_stride", "gate_token"])
def decode_kernel(
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
    parts,
    part_ptr,
    lead,
    kv_lens,
    table_rows,
    block_table,
    num_decodes,
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
    FOLDED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
    PARTIAL: tl.constexpr = False,
):
    """Attend to the parts that this program takes in turn, each for one key head, KEYS keys at a time.

    A row's only part is its output, unless results are PARTIAL. Otherwise the sums of a part's query heads go to its
    line of the scratch. Rows that share keys with a lead row are computed together with it."""
    SUBS: tl.constexpr = BLOCK // KEYS
    LEAST: tl.constexpr = 16 if v_scales is None else FEWEST_WIDENED
    BLOCK_M: tl.constexpr = triton.next_power_of_2(GROUP * FOLDED) if GROUP * FOLDED > 16 else 16
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(DV) if DV > LEAST else LEAST
    m, at, at_v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    num_items = tl.load(part_ptr + num_decodes) * HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part, kv_head = item // HEADS, item % HEADS
        row = tl.load(parts + 3 * part)
        low, end = tl.load(parts + 3 * part + 1), tl.load(parts + 3 * part + 2)
        kv_len, line = tl.load(kv_lens + row), tl.load(table_rows + row)
        alone = (tl.load(part_ptr + row + 1) - tl.load(part_ptr + row) == 1) & (not PARTIAL)
        if window is not None:
            low = tl.maximum(low, tl.maximum(0, kv_len - window) // BLOCK)
        table = block_table + line.to(tl.int64) * table_stride
        coming = tl.load(table + low)
        place, position, present = 0, tl.zeros((BLOCK_M,), tl.int32) + kv_len - 1, m < GROUP
        head, token = kv_head * GROUP + m, row.to(tl.int64)  # of the first row and query head
        if FOLDED > 1:
            place, each = m // GROUP, row + tl.arange(0, FOLDED)
            count = tl.sum((tl.load(lead + each, mask=each < num_decodes, other=-1) == row).to(tl.int32), axis=0)
            position, present, kv_len = position + place, place < count, kv_len + count - 1
            head = kv_head * GROUP + m % GROUP
        # Everything read so far is older than this step.
        await_inputs(OVERLAP)
        q_at = q + token * q_token + (place * q_token + head * q_head)[:, None] + at[None, :]
        rows = tl.load(q_at, mask=present[:, None] & (at < D)[None, :], other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
        for j in range(low * SUBS, tl.minimum(end * SUBS, tl.cdiv(kv_len, KEYS))):
            block, first = coming.to(tl.int64), j % SUBS * KEYS
            # Load block numbers a turn ahead, so that the loads of the next keys need not wait for them.
            coming = tl.load(table + tl.minimum((j + 1) // SUBS, end - 1))
            key_scales, value_scales = k_scales, v_scales
            if k_scales is not None:
                scales_at = block * scale_block + kv_head * BLOCK + first
                key_scales, value_scales = k_scales + scales_at, v_scales + scales_at
            keys_at = k_cache + block * k_block + kv_head * k_head + first * D
            values_at = v_cache + block * v_block + kv_head * v_head + first * DV
            first_key, key = j * KEYS, tl.arange(0, KEYS)
            keys_at = keys_at + key[None, :] * D + at[:, None]
            values_at = values_at + key[:, None] * DV + at_v[None, :]
            scores = add_scores(None, rows, keys_at, key_scales, D)
            scores = of_seen(scores, position, first_key, window, FIRST)
            acc, l_i, m_i = add_values(
                acc, l_i, m_i, scores, scale, values_at, value_scales, first_key, kv_len, rows.dtype, DV, True
            )
        inside = present[:, None] & (at_v < DV)[None, :]
        if alone:
            answer = acc / l_i[:, None]
            if gate is not None:
                gate_at = gate + token * gate_token + (place * gate_token + head * DV)[:, None] + at_v[None, :]
                answer = gated(answer, tl.load(gate_at, mask=inside, other=0.0))
            out_at = out + (token * (HEADS * GROUP) + place * (HEADS * GROUP) + head)[:, None] * DV + at_v[None, :]
            tl.store(out_at, answer.to(out.dtype.element_ty), mask=inside)
        else:
            entry = ((part * FOLDED + place) * (HEADS * GROUP) + head).to(tl.int64)
            tl.store(acc_ptr + entry[:, None] * DV + at_v[None, :], acc, mask=inside)
            tl.store(l_ptr + entry, l_i, mask=present)
            tl.store(m_ptr + entry, m_i, mask=present)
    await_inputs(OVERLAP)  # for programs without a turn
