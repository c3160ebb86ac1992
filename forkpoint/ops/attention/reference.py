"""Paged attention in torch: one row at a time, keys and values gathered from their blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.activation.reference import sigmoid_mul
from forkpoint.ops.linear.scaled import CODES, FP8_MAX, LEAST_AMAX
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.parameters import KVScales

QUERY_TILE = 256
# The logarithm of the sum of exponentials of no keys: finite, so that a row without any keys yields zeros and not NaN.
NO_KEYS = -1.0e30
FIXED_TILE = 64  # queries per tile in deterministic mode; tiles start at multiples of it
# Maps the first query's position, the number of queries and that of keys to which keys they attend to,
# `[queries, keys]` bool.
Masks: TypeAlias = Callable[[int, int, int], Tensor]


def in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x[T, H, D]` to float8_e4m3fn. Returns it and the fp32 scales `[T, H, 1]`, one per token and head."""
    wide = x.float()
    factor = wide.abs().amax(-1, keepdim=True).clamp_min(LEAST_AMAX) / FP8_MAX
    return (wide / factor).to(CODES), factor


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, key_places: Tensor, scales: KVScales | None = None
) -> None:
    """Store `k[T, Hkv, D]`, `v[T, Hkv, Dv]` in `[P, Hkv, block_size, D]` caches of any strides.

    Tokens whose `key_places` is -1 are skipped. With `scales`, 8-bit values are stored, and their scales there.
    """
    if scales is not None:
        (k, k_scale), (v, v_scale) = in_fp8(k), in_fp8(v)
        store_rows(k_scale, scales.k, key_places)
        store_rows(v_scale, scales.v, key_places)
    store_rows(k, k_cache, key_places)
    store_rows(v, v_cache, key_places)


def store_rows(x: Tensor, cache: Tensor, key_places: Tensor) -> None:
    """Store `x[T, H, D]` in a `[P, H, block_size, D]` cache. Slot -1 stores nothing."""
    present = key_places >= 0
    if not bool(present.all()):
        x, key_places = x[present], key_places[present]
    size = cache.shape[2]
    cache[key_places // size, :, key_places % size] = x.to(cache.dtype)


def gather(cache: Tensor, scales: Tensor | None, blocks: Tensor, num_tokens: int, num_padded: int) -> Tensor:
    """Gather the first `num_tokens` tokens of a row as `[1, Hkv, num_padded, D]`, padded with zeros; scaled ones in
    fp32."""
    _, heads, size, dim = cache.shape
    found = cache[blocks]
    if scales is not None:
        found = found.float() * scales[blocks]
    row = found.transpose(0, 1).reshape(1, heads, blocks.shape[0] * size, dim)
    if num_padded > num_tokens:
        # A block may hold anything after the last token, NaN included.
        row = F.pad(row[:, :, :num_tokens], (0, 0, 0, num_padded - num_tokens))
    return row[:, :, :num_padded]


def one_query(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with `q[Hq, D]` to all of `k`, `v` `[1, Hkv, L, D]`; return `[Hq, Dv]`."""
    grouped = q.view(1, k.shape[1], -1, q.shape[-1])  # query heads of one key head are the rows of one product
    return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape[0], -1)


def _causal(start: int, num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys from position 0 on the queries from position `start` on attend to, `[queries, keys]` bool."""
    at = torch.arange(start, start + num_queries, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    mask = keys <= at
    if window is not None:
        mask &= keys > at - window
    return mask


def _tile(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Attend with queries `q[Tq, Hq, D]` to the keys `k[1, Hkv, L, D]` that `mask[Tq, L]` names; return `[Tq, Hq,
    Dv]`."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: AttentionIndex,
    scale: float,
    window: int | None,
    gate: Tensor | None = None,
    scales: KVScales | None = None,
    fixed: bool = False,
) -> Tensor:
    """Return attention over the rows' blocks, `[T, Hq, Dv]` (`table.PagedAttention`).

    With `fixed`, the shapes of products depend only on a query's position: tiles of 64 queries on the absolute grid,
    padded with zero queries, over keys up to the tile's end. The shapes of a decode row depend on its own length.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    caches: list[tuple[Tensor, Tensor | None]] = [(k_cache, None), (v_cache, None)]
    if scales is not None:
        q, caches = q.float(), [(k_cache, scales.k), (v_cache, scales.v)]
    size = k_cache.shape[2]
    lines = index.table_rows.tolist()
    first = 0
    for row, (num_queries, kv_len) in enumerate(zip(*index.on_host(), strict=True)):
        blocks = index.block_table[lines[row], : -(-kv_len // size)].long()
        last = first + num_queries
        if row < index.num_decodes:
            k, v = (gather(*cache, blocks, kv_len, kv_len)[:, :, index.first_key :] for cache in caches)
            if window is not None:
                k, v = k[:, :, -window:], v[:, :, -window:]
            out[first] = one_query(q[first], k, v, scale)
        else:
            padded = kv_len
            if fixed:
                padded = -(-kv_len // FIXED_TILE) * FIXED_TILE
            k, v = (gather(*cache, blocks, kv_len, padded) for cache in caches)
            if window is not None:  # blocks behind it were given back and may hold anything, NaN included
                behind = max(0, kv_len - num_queries + 1 - window)
                k[:, :, :behind], v[:, :, :behind] = 0, 0
            causal = partial(_causal, window=window, device=q.device)
            out[first:last] = segment(q[first:last], kv_len - num_queries, k, v, scale, causal, fixed)
        first = last
    if gate is None:
        return out
    return sigmoid_mul(out, torch.unflatten(gate, 1, out.shape[1:]))


def segment(q: Tensor, start: int, k: Tensor, v: Tensor, scale: float, masks: Masks, fixed: bool) -> Tensor:
    """Attend with queries `q[Tq, Hq, D]` at positions from `start` on, in tiles, to keys up to each tile's end."""
    tile, low, end = QUERY_TILE, start, start + len(q)
    if fixed:
        tile, low = FIXED_TILE, start // FIXED_TILE * FIXED_TILE
    padded = F.pad(q, (0, 0, 0, 0, start - low, k.shape[2] - end))
    parts = []
    for at in range(low, k.shape[2], tile):
        own, keys, values = padded[at - low : at - low + tile], k[:, :, : at + tile], v[:, :, : at + tile]
        if fixed:  # copy, because a slice of a longer row has other strides, which may change the bits
            own, keys, values = own.contiguous(), keys.contiguous(), values.contiguous()
        parts.append(_tile(own, keys, values, scale, masks(at, len(own), keys.shape[2])))
    return torch.cat(parts)[start - low : end - low]


def partial_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: AttentionIndex,
    scale: float,
    starts: Tensor | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """Return attention of decode rows to the keys of one rank, in torch (`table.PartialAttention`)."""
    out = q.new_zeros((*q.shape[:2], v_cache.shape[3] + 1), dtype=torch.float32)
    out[..., -1] = NO_KEYS
    heads, size = k_cache.shape[1:3]
    lines, lows = index.table_rows.tolist(), [index.first_key] * len(q)
    if starts is not None:
        lows = starts.clip(min=index.first_key).tolist()
    for row, (low, count) in enumerate(zip(lows, index.on_host()[1], strict=True)):
        if count <= low:
            continue
        blocks = index.block_table[lines[row], : -(-count // size)].long()
        keys, values = (cache[blocks].float() for cache in (k_cache, v_cache))
        if scales is not None:
            keys, values = keys * scales.k[blocks], values * scales.v[blocks]
        keys, values = (x.transpose(0, 1).flatten(1, 2)[:, low:count] for x in (keys, values))
        scores = q[row].float().view(heads, -1, q.shape[2]) @ keys.mT * scale  # heads that share keys: rows
        total = scores.logsumexp(dim=-1, keepdim=True)
        out[row] = torch.cat([(scores - total).exp() @ values, total], dim=-1).flatten(0, 1)
    return out
