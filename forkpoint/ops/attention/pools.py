"""Attention to the pools of keys that an index chooses for each query, in torch.

A pool is `size` consecutive tokens, counted from a sequence's first token, and has one index key. A query attends to at
most `most` complete pools, those with the highest scores, and to the tokens after the last complete pool. Equal scores
are settled by position: the earlier pool is chosen. A choice is `[T, most]` int32: the numbers of the chosen pools in
ascending order, then -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.activation.reference import sigmoid_mul
from forkpoint.ops.attention.reference import FIXED_TILE, gather, one_query, segment
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.parameters import KVScales, PoolRule

QUERIES = 16  # of prefill per product with their own keys; they start at multiples of it in deterministic mode
DENSE_FACTOR = 4  # up to so many times the keys of a choice, prefill computes products with all keys
KEY_TILE = 4096  # index keys per product; tiles start at multiples of it
NO_POOL = -1


def choose_pools(
    q: Tensor, weights: Tensor, cache: Tensor, index: AttentionIndex, rule: PoolRule, fixed: bool = False
) -> Tensor:
    """Implement `table.ChoosePools`.

    With `fixed`, the shapes of products depend only on a query's position, as those of `paged_attention` do."""
    chosen = torch.full((len(q), rule.most), NO_POOL, dtype=torch.int32, device=q.device)
    for row, first, num_queries, kv_len, blocks in _rows(cache, index):
        start, last = kv_len - num_queries, first + num_queries
        if kv_len // rule.size <= rule.most:  # all complete pools are chosen
            chosen[first:last] = _all_complete(start, num_queries, rule, q.device)
            continue
        num_keys = kv_len // rule.size
        low, end = start, kv_len
        if fixed and row >= index.num_decodes:
            low, end = start // FIXED_TILE * FIXED_TILE, -(-kv_len // FIXED_TILE) * FIXED_TILE
        keys, around = (
            _index_keys(cache[blocks], q.shape[2], num_keys, -(-end // rule.size)),
            (start - low, end - kv_len),
        )
        own, factors = F.pad(q[first:last].float(), (0, 0, 0, 0, *around)), F.pad(weights[first:last], (0, 0, *around))
        parts = []
        for at in range(low, end, FIXED_TILE):
            upper = min(at + FIXED_TILE, end)
            tile = slice(at - low, upper - low)
            complete = (torch.arange(at, upper, device=q.device) + 1) // rule.size
            scores = _scores(own[tile], factors[tile], keys[: -(-upper // rule.size)])
            parts.append(_highest(scores, complete, rule.most))
        chosen[first:last] = torch.cat(parts)[start - low : start - low + num_queries]
    return chosen


def pool_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: AttentionIndex,
    scale: float,
    chosen: Tensor,
    rule: PoolRule,
    gate: Tensor | None = None,
    scales: KVScales | None = None,
    fixed: bool = False,
) -> Tensor:
    """Implement `table.PoolAttention`.

    A decode row reads only the chosen keys. So do the queries of prefill after the first keys, where that is less work
    than a product with all keys. `fixed`: see `paged_attention`; heads are also computed one by one, so that bits do
    not depend on how ranks share the heads."""
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    factors: tuple[Tensor | None, Tensor | None] = (None, None)
    if scales is not None:
        q, factors = q.float(), (scales.k, scales.v)
    for row, first, num_queries, kv_len, blocks in _rows(k_cache, index):
        last, kept = first + num_queries, Kept((k_cache, factors[0]), (v_cache, factors[1]), blocks)
        if row < index.num_decodes:
            positions, there = _positions(chosen[first:last], kv_len - 1, rule)
            there &= positions >= index.first_key
            k, v = (_keys_at(*own, blocks, positions[there][None]) for own in (kept.keys, kept.values))
            for heads, kv_heads in _groups(q, k, fixed):
                out[first, heads] = one_query(q[first, heads], k[:, kv_heads], v[:, kv_heads], scale)
            continue
        start = kv_len - num_queries
        dense = max(FIXED_TILE, DENSE_FACTOR * rule.size * rule.most // FIXED_TILE * FIXED_TILE)
        apart = first + min(max(dense - start, 0), num_queries)
        if apart > first:
            own = slice(first, apart)
            out[own] = _among_all(q[own], start, chosen[own], kept, scale, rule, fixed)
        if apart < last:
            own = slice(apart, last)
            out[own] = _among_chosen(q[own], start + apart - first, chosen[own], kept, scale, rule, fixed)
    if gate is None:
        return out
    return sigmoid_mul(out, torch.unflatten(gate, 1, out.shape[1:]))


def _rows(cache: Tensor, index: AttentionIndex) -> Iterator[tuple[int, int, int, int, Tensor]]:
    """Yield for each row its number, its first query, its numbers of queries and of keys, and its blocks."""
    first, lines = 0, index.table_rows.tolist()
    for row, (num_queries, kv_len) in enumerate(zip(*index.on_host(), strict=True)):
        if num_queries:
            yield row, first, num_queries, kv_len, index.block_table[lines[row], : -(-kv_len // cache.shape[2])].long()
        first += num_queries


class Kept(NamedTuple):
    """The keys and values of a row, which lie in these blocks. Each is a cache, and its scales if it is in 8 bits."""

    keys: tuple[Tensor, Tensor | None]
    values: tuple[Tensor, Tensor | None]
    blocks: Tensor


def _among_all(q: Tensor, start: int, chosen: Tensor, kept: Kept, scale: float, rule: PoolRule, fixed: bool) -> Tensor:
    """Attend with queries at positions from `start` on, by a product with all keys of which the others are masked."""
    end, padded = start + len(q), start + len(q)
    if fixed:
        padded = -(-end // FIXED_TILE) * FIXED_TILE
    blocks = kept.blocks[: -(-end // kept.keys[0].shape[2])]
    k, v = (gather(*own, blocks, end, padded) for own in (kept.keys, kept.values))

    def mask(at: int, count: int, num_keys: int) -> Tensor:
        return _attended(chosen, at - start, torch.arange(at, at + count, device=q.device), num_keys, rule)

    out = q.new_empty(*q.shape[:2], v.shape[3])
    for heads, kv_heads in _groups(q, k, fixed):
        out[:, heads] = segment(q[:, heads], start, k[:, kv_heads], v[:, kv_heads], scale, mask, fixed)
    return out


def _among_chosen(
    q: Tensor, start: int, chosen: Tensor, kept: Kept, scale: float, rule: PoolRule, fixed: bool
) -> Tensor:
    """Attend with queries at positions from `start` on, each to the keys of its own choice."""
    low, end = start, start + len(q)
    if fixed:
        low, end = start // QUERIES * QUERIES, -(-end // QUERIES) * QUERIES
    around = (start - low, end - start - len(q))
    q, chosen = F.pad(q, (0, 0, 0, 0, *around)), F.pad(chosen, (0, 0, *around), value=NO_POOL)
    out = q.new_empty(*q.shape[:2], kept.values[0].shape[3])
    for at in range(low, end, QUERIES):
        tile = slice(at - low, min(at + QUERIES, end) - low)
        positions, there = _positions(chosen[tile], at, rule)
        there[:, 0] |= ~there.any(dim=1)  # padding attends to something, so that nothing divides by 0
        k = v = _keys_at(*kept.keys, kept.blocks, positions)
        if kept.values[0] is not kept.keys[0]:
            v = _keys_at(*kept.values, kept.blocks, positions)
        for heads, kv_heads in _groups(q, k, fixed):
            own, keys, values = q[tile, heads], k[:, kv_heads].contiguous(), v[:, kv_heads].contiguous()
            grouped = own.reshape(len(own), keys.shape[1], -1, own.shape[2])
            found = F.scaled_dot_product_attention(grouped, keys, values, there[:, None, None], scale=scale)
            out[tile, heads] = found.flatten(1, 2)
    return out[around[0] : len(out) - around[1]]


def _positions(chosen: Tensor, first: int, rule: PoolRule) -> tuple[Tensor, Tensor]:
    """Return the positions to which queries attend, `[Tq, most * size + size - 1]`, and which of them count.

    Those that count ascend. The first query of `chosen[Tq, most]` is at position `first`.
    """
    at = torch.arange(first, first + len(chosen), device=chosen.device)[:, None]
    within = torch.arange(rule.size, device=chosen.device)
    pools = (chosen.long()[:, :, None] * rule.size + within).flatten(1)
    opened = (at + 1) // rule.size * rule.size + within[:-1]
    positions = torch.cat((pools, opened), dim=1)
    there = (positions >= 0) & (positions <= at)
    return torch.where(there, positions, 0), there


def _keys_at(cache: Tensor, scales: Tensor | None, blocks: Tensor, positions: Tensor) -> Tensor:
    """Gather the entries at the positions `[Tq, S]` of a row as `[Tq, Hkv, S, D]`; scaled ones in fp32."""
    size = cache.shape[2]
    at = blocks[positions // size], slice(None), positions % size
    entries = cache[at]
    if scales is not None:
        entries = entries.float() * scales[at]
    return entries.transpose(1, 2).contiguous()


def _groups(q: Tensor, k: Tensor, fixed: bool) -> list[tuple[slice, slice]]:
    """Return the heads of queries and of keys that are computed together."""
    if not fixed:
        return [(slice(None), slice(None))]
    share = q.shape[1] // k.shape[1]
    return [(slice(h, h + 1), slice(h // share, h // share + 1)) for h in range(q.shape[1])]


def _all_complete(start: int, num_queries: int, rule: PoolRule, device: torch.device) -> Tensor:
    """Return all pools `[T, most]` that are complete for the queries at positions from `start` on."""
    complete = (torch.arange(start, start + num_queries, device=device) + 1) // rule.size
    pools = torch.arange(rule.most, device=device)
    return torch.where(pools < complete[:, None], pools, NO_POOL).int()


def _index_keys(blocks: Tensor, dim: int, num_keys: int, num_padded: int) -> Tensor:
    """Return a row's first index keys in fp32, `[num_padded, dim]`. Those from `num_keys` on are zeros."""
    keys = blocks.reshape(-1, dim)[:num_keys].float()
    return F.pad(keys, (0, 0, 0, num_padded - num_keys))


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return `sum_h weights[t, h] * relu(q[t, h] . keys[p])`, `[T, P]` fp32."""
    parts = []
    for low in range(0, len(keys), KEY_TILE):
        products = F.relu(q.flatten(0, 1) @ keys[low : low + KEY_TILE].contiguous().T).view(*q.shape[:2], -1)
        total = products[:, 0] * weights[:, 0, None]
        for head in range(1, q.shape[1]):  # in one order, whatever the shape
            total += products[:, head] * weights[:, head, None]
        parts.append(total)
    return torch.cat(parts, dim=1)


def _highest(scores: Tensor, complete: Tensor, most: int) -> Tensor:
    """Return the `most` pools of the highest scores `[T, P]` among the first `complete[T]` of each query, ascending."""
    pools = torch.arange(scores.shape[1], device=scores.device)
    there = pools < complete[:, None]
    order = scores.masked_fill(~there, float("-inf")).sort(dim=1, descending=True, stable=True).indices[:, :most]
    beyond = scores.shape[1]
    found = torch.where(order < complete[:, None], order, beyond).sort(dim=1).values
    found = torch.where(found < beyond, found, NO_POOL).int()
    return F.pad(found, (0, most - found.shape[1]), value=NO_POOL)


def _attended(chosen: Tensor, first: int, at: Tensor, num_keys: int, rule: PoolRule) -> Tensor:
    """Return which of the keys from position 0 on the queries at positions `at[Tq]` attend to, `[Tq, num_keys]` bool.

    `chosen[first]` belongs to the first of these queries. Queries without a choice are padding, whose results are not
    used."""
    num_pools = -(-num_keys // rule.size)
    low, high = max(0, first), min(len(chosen), first + len(at))
    pools = torch.zeros(len(at), num_pools + 1, dtype=torch.bool, device=at.device)
    own = chosen[low:high].long()
    pools[low - first : high - first].scatter_(1, torch.where(own < 0, num_pools, own), True)
    mask = pools[:, :num_pools].repeat_interleave(rule.size, dim=1)[:, :num_keys]
    keys = torch.arange(num_keys, device=at.device)
    opened = (at[:, None] + 1) // rule.size * rule.size
    return mask | ((keys >= opened) & (keys <= at[:, None]))
