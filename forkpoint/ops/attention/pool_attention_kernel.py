"""Attention to chosen pools of keys in Triton (`table.PoolAttention`). pools.py has it in torch.

A program takes one query with the heads that share its keys, and gathers the keys of the query's own pools. A few
queries have their keys split among programs, whose sums a second launch joins. Launches depend only on tensor shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.attention.pool_choice_kernel import place_of
from forkpoint.ops.attention.softmax import FEWEST_WIDENED, LOG2_E, LOWEST, gated, join, scratch, shares
from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.metadata import TILE, AttentionIndex
from forkpoint.ops.parameters import KVScales, PoolRule
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.platforms.table import traits_of

FIXED_SPLITS = 8  # of the keys of a decode row where bits must not depend on the batch
MOST_SPLITS = 16
MOST_HEADS = 64  # heads of one key head per program
WIDE_DIMS = 256  # above, steps have half as many keys


@triton.jit(do_not_specialize=["table_stride", "gate_token", "num_splits"])
def _attend_kernel(
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
    chosen,
    items,
    cu_queries,
    kv_lens,
    table_rows,
    block_table,
    table_stride,
    gate_token,
    num_splits,
    q_token,
    q_head,
    k_block,
    k_head,
    v_block,
    v_head,
    scale_block,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
    DECODE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend with up to BLOCK_M heads of one query to one of `num_splits` shares of its keys, KEYS at a time.

    Keys ascend: those of the chosen pools, then those after the last complete pool. If they are SHARED, a key's first
    DV dims are its value. With several shares, sums go to the scratch.
    """
    await_inputs(OVERLAP)
    PIECES: tl.constexpr = triton.cdiv(GROUP, BLOCK_M)
    pid = tl.program_id(0)
    split, piece = pid % num_splits, pid // num_splits % PIECES
    kv_head, own = pid // (num_splits * PIECES) % HEADS, pid // (num_splits * PIECES * HEADS)
    row, token, position, count = place_of(items, cu_queries, kv_lens, 0, own, 1, DECODE)
    if count > 0:
        LEAST: tl.constexpr = 16 if v_scales is None else FEWEST_WIDENED
        BLOCK_DV: tl.constexpr = triton.next_power_of_2(DV) if DV > LEAST else LEAST
        BLOCK_D: tl.constexpr = BLOCK_DV if SHARED else (triton.next_power_of_2(D) if D > 16 else 16)
        query = token.to(tl.int64)
        in_group = piece * BLOCK_M + tl.arange(0, BLOCK_M)
        head, present = kv_head * GROUP + in_group, in_group < GROUP
        d, dv, key = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, KEYS)
        q_at = q + query * q_token + (head * q_head)[:, None] + d[None, :]
        rows = tl.load(q_at, mask=present[:, None] & (d < D)[None, :], other=0.0)
        table = block_table + tl.load(table_rows + row).to(tl.int64) * table_stride
        num_complete = (position + 1) // SIZE
        num_chosen = tl.minimum(num_complete, MOST)
        num_steps = tl.cdiv((num_chosen + 1) * SIZE, KEYS)
        each = tl.cdiv(num_steps, num_splits)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
        for step in range(split * each, tl.minimum((split + 1) * each, num_steps)):
            entry = (step * KEYS + key) // SIZE
            pool = tl.load(chosen + query * MOST + entry, mask=entry < num_chosen, other=0)
            pool = tl.where(entry < num_chosen, pool, num_complete)
            at = pool * SIZE + key % SIZE
            seen = (entry <= num_chosen) & (at <= position) & (at >= FIRST)
            at = tl.where(seen, at, 0)
            block = tl.load(table + at // BLOCK).to(tl.int64)
            place = at % BLOCK
            keys_at = k_cache + (block * k_block + kv_head * k_head + place * D)[None, :] + d[:, None]
            keys = tl.load(keys_at, mask=(d < D)[:, None], other=0.0)
            if k_scales is not None:
                keys = keys.to(rows.dtype)
            scores = tl.dot(rows, keys, input_precision="ieee")
            if k_scales is not None:
                scales_at = block * scale_block + kv_head * BLOCK + place
                scores *= tl.load(k_scales + scales_at)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            p, alpha, l_i, m_i = shares(l_i, m_i, scores, scale)
            if SHARED:
                values = tl.trans(keys)
            else:
                values_at = v_cache + (block * v_block + kv_head * v_head + place * DV)[:, None] + dv[None, :]
                values = tl.load(values_at, mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
            if v_scales is not None:
                values = values.to(rows.dtype)
                p *= tl.load(v_scales + scales_at, mask=seen, other=0.0)[None, :]
            acc = acc * alpha[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        inside = present[:, None] & (dv < DV)[None, :]
        if num_splits == 1:
            answer = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]  # padding has no keys
            if gate is not None:
                gate_at = gate + query * gate_token + (head * DV)[:, None] + dv[None, :]
                answer = gated(answer, tl.load(gate_at, mask=inside, other=0.0))
            out_at = out + (query * (HEADS * GROUP) + head)[:, None] * DV + dv[None, :]
            tl.store(out_at, answer.to(out.dtype.element_ty), mask=inside)
        else:
            line = (query * num_splits + split) * (HEADS * GROUP) + head
            tl.store(acc_ptr + line[:, None] * DV + dv[None, :], acc, mask=inside)
            tl.store(l_ptr + line, l_i, mask=present)
            tl.store(m_ptr + line, m_i, mask=present)


@triton.jit(do_not_specialize=["gate_token", "num_splits"])
def _join_kernel(
    acc_ptr,
    l_ptr,
    m_ptr,
    out,
    gate,
    gate_token,
    num_splits,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the shares of one head of one decode row."""
    await_inputs(OVERLAP)
    token, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    dv = tl.arange(0, triton.next_power_of_2(DV))
    answer = join(acc_ptr, l_ptr, m_ptr, token * (num_splits * HEADS) + head, num_splits, HEADS, dv, DV)
    if gate is not None:
        answer = gated(answer, tl.load(gate + token * gate_token + head * DV + dv, mask=dv < DV, other=0.0))
    tl.store(out + (token * HEADS + head) * DV + dv, answer.to(out.dtype.element_ty), mask=dv < DV)


class TritonPoolAttention:
    """The `pool_attention` operator. With `deterministic`, the keys of decode rows are always split alike."""

    def __init__(self, deterministic: bool) -> None:
        self._deterministic = deterministic

    def _splits(self, q: Tensor, programs: int, num_steps: int) -> int:
        """Return among how many programs the keys of a decode row are split."""
        most = min(MOST_SPLITS, -(-num_steps // 2))
        if self._deterministic:
            return min(most, FIXED_SPLITS)
        return max(1, min(most, traits_of(q.device).num_processors // max(1, programs)))

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index: AttentionIndex,
        scale: float,
        chosen: Tensor,
        rule: PoolRule,
        gate: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Return attention to the chosen pools, `[T, Hq, Dv]` (`table.PoolAttention`)."""
        assert k_cache[0, 0].is_contiguous() and v_cache[0, 0].is_contiguous(), "a head's share of a block is dense"
        assert q.stride(2) == 1 and chosen.is_contiguous() and (gate is None or gate.stride(1) == 1)
        assert scales is None or scales.fit(k_cache), "scales lie in their blocks, one for each key"
        assert scale > 0 and index.work is not None, "largest scores are taken before they are scaled"
        (tokens, heads, dim), (kv_heads, block, value_dim) = q.shape, v_cache.shape[1:]
        out, wide = q.new_empty(tokens, heads, value_dim), q.dtype == torch.float32
        group, keys = heads // kv_heads, 32 if wide or dim > WIDE_DIMS else 64
        block_m = max(16, min(MOST_HEADS // (1 + wide), next_power_of_2(group)))
        sizes: dict[str, Any] = {"HEADS": kv_heads, "GROUP": group, "D": dim, "DV": value_dim, "BLOCK": block}
        sizes |= {"SIZE": rule.size, "MOST": rule.most, "FIRST": index.first_key}
        sizes |= {"BLOCK_M": block_m, "KEYS": max(keys, rule.size)}
        sizes["SHARED"] = v_cache.data_ptr() == k_cache.data_ptr() and dim == value_dim
        near = overlap(q.device, tokens)
        sizes |= {"num_warps": 4 if block_m <= 16 else 8, "num_stages": 1 if wide else 2, **near}
        factors: tuple[Tensor | None, ...] = (None, None)
        scale_block: int | None = None
        if scales is not None:
            factors, scale_block = (scales.k, scales.v), scales.k.stride(0)
        gate_token = 0 if gate is None else gate.stride(0)
        rows = (index.cu_queries, index.kv_lens, index.table_rows, index.block_table)
        strides = (*q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], scale_block, scale * LOG2_E)
        programs, tiles = kv_heads * ceil_div(group, block_m), index.work.tiles
        for decode, count in ((True, index.num_decodes), (False, len(tiles) * TILE)):
            if count:
                splits = 1
                if decode:
                    splits = self._splits(q, count * programs, -(-(rule.most + 1) * rule.size // sizes["KEYS"]))
                sums = scratch(count * splits * heads if splits > 1 else 0, value_dim, q.device)
                _attend_kernel[(count * programs * splits,)](
                    *(q, k_cache, v_cache, *factors, out, gate, *sums, chosen, tiles, *rows),
                    *(index.block_table.stride(0), gate_token, splits, *strides),
                    **sizes,
                    DECODE=decode,
                )
                if splits > 1:
                    form = {"HEADS": heads, "DV": value_dim, "num_warps": 2, **near}
                    _join_kernel[(count * heads,)](*sums, out, gate, gate_token, splits, **form)
        return out
