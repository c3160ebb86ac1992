"""Attention of one row's many new tokens over keys and values computed from latents, in Triton.

Over latents, a query and a key have R + P dims and a value has R dims. Keys and values computed by the heads' own
matrices have far fewer dims, but each of them costs a product. That pays where many queries share them. PIECE keys are
computed at a time, whatever the row's length, and the softmax sums continue from piece to piece.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.attention.softmax import LOG2_E, LOWEST, add_scores, add_values, of_seen, scratch
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.rounding import ceil_div

PIECE = 8192  # keys computed from latents at a time
KEYS = tl.constexpr(64)  # keys per step of a program
QUERIES = 128  # queries per program


@triton.jit(do_not_specialize=["num_queries", "first_key", "before", "num_keys"])
def _expanded_kernel(
    own_q,
    shared_q,
    up,
    latent,
    out,
    acc_ptr,
    l_ptr,
    m_ptr,
    num_queries,
    first_key,
    before,
    num_keys,
    own_token,
    own_head,
    shared_token,
    shared_head,
    up_row,
    latent_row,
    scale,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Attend with BLOCK_M queries of one head to a piece of `num_keys` keys from `first_key` on.

    The piece starts `before` tokens before the queries. `up[., HEADS * (K + V)]` holds keys and values, `latent` the
    part of the key that all heads share. Sums are loaded from the scratch unless this is the first piece, and stored
    there unless it is the last. Late tiles see the most keys and start first. Programs of one head are adjacent.
    """
    BLOCK_K: tl.constexpr = triton.next_power_of_2(K) if K > 16 else 16
    BLOCK_P: tl.constexpr = triton.next_power_of_2(P) if P > 16 else 16
    BLOCK_V: tl.constexpr = triton.next_power_of_2(V) if V > 16 else 16
    tiles = tl.cdiv(num_queries, BLOCK_M)
    pid = tl.program_id(0)
    head, tile = pid // tiles, tiles - 1 - pid % tiles
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k, p, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    present = query < num_queries
    own_at = own_q + query[:, None].to(tl.int64) * own_token + head * own_head + k[None, :]
    own = tl.load(own_at, mask=present[:, None] & (k < K)[None, :], other=0.0)
    shared_at = shared_q + query[:, None].to(tl.int64) * shared_token + head * shared_head + p[None, :]
    shared = tl.load(shared_at, mask=present[:, None] & (p < P)[None, :], other=0.0)
    entry = query.to(tl.int64) * HEADS + head
    sums_at, in_sums = acc_ptr + entry[:, None] * V + v[None, :], present[:, None] & (v < V)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    if first_key > 0:
        acc = tl.load(sums_at, mask=in_sums, other=0.0)
        l_i = tl.load(l_ptr + entry, mask=present, other=0.0)
        m_i = tl.load(m_ptr + entry, mask=present, other=LOWEST)
    up_at = up + head * (K + V)
    position = before + query
    end = tl.minimum(num_keys, before + tl.minimum((tile + 1) * BLOCK_M, num_queries))
    full = tl.maximum(0, tl.minimum(num_keys, before + tile * BLOCK_M + 1)) // KEYS * KEYS  # keys that every query sees
    for masked in tl.static_range(2):
        from_key, to_key = 0, full
        if masked:
            from_key, to_key = full, end
        for first in range(from_key, to_key, KEYS):
            keys_at = up_at + first * up_row.to(tl.int64)
            values_at, common_at, key = keys_at + K, latent + first * latent_row, tl.arange(0, KEYS)
            keys_at = keys_at + key[None, :] * up_row + k[:, None]
            values_at = values_at + key[:, None] * up_row + v[None, :]
            scores = add_scores(None, own, keys_at, None, K)
            scores = add_scores(scores, shared, common_at + key[None, :] * latent_row + p[:, None], None, P)
            if masked:
                scores = of_seen(scores, position, first, None, 0)
            acc, l_i, m_i = add_values(
                acc, l_i, m_i, scores, scale, values_at, None, first, num_keys, own.dtype, V, masked
            )
    if num_keys == before + num_queries:
        out_at = out + entry[:, None] * V + v[None, :]
        tl.store(out_at, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=in_sums)
    else:
        tl.store(sums_at, acc, mask=in_sums)
        tl.store(l_ptr + entry, l_i, mask=present)
        tl.store(m_ptr + entry, m_i, mask=present)


def latent_prefill(
    own: Tensor,
    shared: Tensor,
    cache: Tensor,
    rank: int,
    expand: Callable[[Tensor], Tensor],
    index: AttentionIndex,
    row: int,
    scale: float,
    out: Tensor,
) -> None:
    """Write attention of one row's new tokens, over expanded latents, to `out` (`table.LatentPrefill`)."""
    num_queries, kv_len = index.query_lens[row], index.host_kv_lens[row]
    heads, dim, value_dim = own.shape[1], own.shape[2], out.shape[2]
    assert own.stride(2) == 1 and shared.stride(2) == 1 and out.is_contiguous(), "rows must be dense"
    block, is_wide = cache.shape[2], own.dtype == torch.float32
    block_m = QUERIES // (1 + is_wide)
    table = index.block_table.index_select(0, index.table_rows[row : row + 1])[0]
    entries = num_queries * heads if kv_len > PIECE else 0
    sums = scratch(entries, value_dim, own.device)
    sizes = {"HEADS": heads, "K": dim, "P": shared.shape[2], "V": value_dim, "BLOCK_M": block_m}
    sizes |= {"num_warps": 8, "num_stages": 1 if is_wide else 2}
    for start in range(0, kv_len, PIECE):
        end = min(start + PIECE, kv_len)
        latent = cache.index_select(0, table[start // block : -(-end // block)]).view(-1, cache.shape[3])
        up = expand(latent[:, :rank])
        operands = (own, shared, up, latent[:, rank:], out, *sums)
        strides = (*own.stride()[:2], *shared.stride()[:2], up.stride(0), latent.stride(0))
        counts = (num_queries, start, kv_len - num_queries - start, end - start)
        programs = ceil_div(num_queries, block_m) * heads
        _expanded_kernel[(programs,)](*operands, *counts, *strides, scale * LOG2_E, **sizes)
