"""The choice of pools of keys in Triton (`table.ChoosePools`). pools.py has it in torch.

One launch scores the complete pools of each query. The next one finds the lowest score that is chosen, 4 bits at a
time, and lists the chosen pools by position. Launches depend only on tensor shapes, so a recorded graph can hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.metadata import TILE as TOKEN_TILE
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.parameters import PoolRule
from forkpoint.ops.rounding import next_power_of_2
from forkpoint.platforms.table import traits_of

TILE = tl.constexpr(TOKEN_TILE)
NO_POOL = tl.constexpr(-1)
DIGIT = tl.constexpr(4)  # bits of a score that one pass over the scores settles
LOWEST_KEY = tl.constexpr(-(2**31))
SCORES_AT_ONCE = 1 << 26  # scores that are kept between the two launches; longer batches take turns
POOLS_PER_STEP = 1024  # of a pass over the scores
WAVES = 4  # programs that score, per processor


@triton.jit
def place_of(items, cu_queries, kv_lens, first, own, QUERIES: tl.constexpr, DECODE: tl.constexpr):
    """Return (row, token, position, count) of program `own`: its row, its first query and how many queries it has.

    `items` are tiles, each for TILE / QUERIES programs. For DECODE rows there are none, and the rows start at `first`.
    Programs without queries have a count of 0.
    """
    if DECODE:
        row = first + own
        token = row
        position = tl.load(kv_lens + row) - 1
        count = row * 0 + 1
    else:
        SUBS: tl.constexpr = TILE // QUERIES
        row = tl.load(items + 2 * (own // SUBS))
        there = row >= 0
        row = tl.maximum(row, 0)
        offset = tl.load(items + 2 * (own // SUBS) + 1) + own % SUBS * QUERIES
        start = tl.load(cu_queries + row)
        num_queries = tl.load(cu_queries + row + 1) - start
        token = start + offset
        position = tl.load(kv_lens + row) - num_queries + offset
        count = tl.where(there, tl.minimum(tl.maximum(num_queries - offset, 0), QUERIES), 0)
    return row, token, position, count


@triton.jit(do_not_specialize=["first", "table_stride", "width", "num_splits"])
def _scores_kernel(
    q,
    weights,
    cache,
    out,
    items,
    cu_queries,
    kv_lens,
    table_rows,
    block_table,
    first,
    table_stride,
    width,
    num_splits,
    q_token,
    q_head,
    weight_token,
    cache_block,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDE: tl.constexpr,
    KEYS: tl.constexpr,
    DECODE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Score every `num_splits`-th tile of KEYS pools for QUERIES queries.

    A score is stored as an int32 of the same order. Queries whose complete pools are all chosen need no scores.
    """
    await_inputs(OVERLAP)
    own = tl.program_id(0) // num_splits
    row, token, position, count = place_of(items, cu_queries, kv_lens, first, own, QUERIES, DECODE)
    num_pools = (position + count) // SIZE  # that are complete for the last of the queries
    if (count > 0) & (num_pools > MOST):
        POOLS: tl.constexpr = BLOCK // SIZE
        BLOCK_D: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
        m, d = tl.arange(0, QUERIES * WIDE), tl.arange(0, BLOCK_D)
        query, head = token.to(tl.int64) + m // WIDE, m % WIDE
        present = (m // WIDE < count) & (head < HEADS)
        q_at = q + (query * q_token + head * q_head)[:, None] + d[None, :]
        rows = tl.load(q_at, mask=present[:, None] & (d < D)[None, :], other=0.0)
        factors = tl.load(weights + query * weight_token + head, mask=present, other=0.0)
        table = block_table + tl.load(table_rows + row).to(tl.int64) * table_stride
        slot = own.to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
        for step in range(tl.program_id(0) % num_splits, tl.cdiv(num_pools, KEYS), num_splits):
            pool = step * KEYS + tl.arange(0, KEYS)
            complete = pool < num_pools
            block = tl.load(table + pool // POOLS, mask=complete, other=0).to(tl.int64)
            keys_at = cache + (block * cache_block + pool % POOLS * D)[None, :] + d[:, None]
            keys = tl.load(keys_at, mask=complete[None, :] & (d < D)[:, None], other=0.0)
            products = tl.dot(rows, keys, input_precision="ieee")
            products = tl.maximum(products, 0.0) * factors[:, None]
            scores = tl.sum(tl.reshape(products, (QUERIES, WIDE, KEYS)), axis=1)
            scores = tl.where(scores == 0.0, 0.0, scores)  # -0.0 equals 0.0
            bits = scores.to(tl.int32, bitcast=True)
            bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            tl.store(out + slot[:, None] * width + pool[None, :], bits, mask=complete[None, :])


@triton.jit(do_not_specialize=["first", "width"])
def _choice_kernel(
    scores,
    out,
    items,
    cu_queries,
    kv_lens,
    first,
    width,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    POOLS: tl.constexpr,
    DECODE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """List the chosen pools of one query, POOLS scores at a time."""
    await_inputs(OVERLAP)
    own = tl.program_id(0)
    _, token, position, count = place_of(items, cu_queries, kv_lens, first, own, 1, DECODE)
    if count > 0:
        num_pools = (position + 1) // SIZE
        out_at, at = out + token.to(tl.int64) * MOST, tl.arange(0, POOLS)
        if num_pools <= MOST:
            for low in range(0, MOST, POOLS):
                pool = low + at
                tl.store(out_at + pool, tl.where(pool < num_pools, pool, NO_POOL), mask=pool < MOST)
        else:
            own_scores = scores + own.to(tl.int64) * width
            # The largest number that at least MOST scores reach, found digit by digit.
            least = tl.full((1,), LOWEST_KEY, tl.int32)
            candidate = tl.arange(0, 2**DIGIT)
            for step in range(32 // DIGIT):
                place = 32 - DIGIT * (step + 1)
                bounds = least + (candidate << place)
                counts = tl.zeros((2**DIGIT,), tl.int32)
                for low in range(0, num_pools, POOLS):
                    here = low + at < num_pools
                    score = tl.load(own_scores + low + at, mask=here, other=0)
                    reached = (score[:, None] >= bounds[None, :]) & here[:, None]
                    counts += tl.sum(reached.to(tl.int32), axis=0)
                digit = tl.sum((counts >= MOST).to(tl.int32), axis=0) - 1
                least = least + (digit << place)
            num_above = 0
            for low in range(0, num_pools, POOLS):
                here = low + at < num_pools
                score = tl.load(own_scores + low + at, mask=here, other=0)
                num_above += tl.sum(((score > least) & here).to(tl.int32), axis=0)
            num_listed, num_equal = 0, 0
            for low in range(0, num_pools, POOLS):
                here = low + at < num_pools
                score = tl.load(own_scores + low + at, mask=here, other=0)
                equal = ((score == least) & here).to(tl.int32)
                early = num_equal + tl.cumsum(equal, axis=0) <= MOST - num_above
                taken = (((score > least) & here) | ((equal > 0) & early)).to(tl.int32)
                tl.store(out_at + num_listed + tl.cumsum(taken, axis=0) - 1, low + at, mask=taken > 0)
                num_listed += tl.sum(taken, axis=0)
                num_equal += tl.sum(equal, axis=0)


def choose_pools(q: Tensor, weights: Tensor, cache: Tensor, index: AttentionIndex, rule: PoolRule) -> Tensor:
    """Choose the pools of keys that each query attends to (`table.ChoosePools`).

    A query's choice depends on nothing but the query and its keys."""
    assert q.stride(2) == 1 and weights.stride(1) == 1 and cache[0, 0].is_contiguous(), "rows must be dense"
    chosen = torch.full((len(q), rule.most), NO_POOL.value, dtype=torch.int32, device=q.device)
    block, (heads, dim) = cache.shape[2], q.shape[1:]
    width = most_pools = index.block_table.shape[1] * (block // rule.size)
    if index.host_kv_lens:
        width = min(width, -(-max(index.host_kv_lens) // rule.size))
    wide_heads, at_once = next_power_of_2(heads), WAVES * traits_of(q.device).num_processors
    rows = (index.cu_queries, index.kv_lens)
    table = (index.table_rows, index.block_table)
    strides = (*q.stride()[:2], weights.stride(0), cache.stride(0))
    form: dict[str, Any] = {"SIZE": rule.size, "MOST": rule.most, **overlap(q.device, len(q))}
    step = min(POOLS_PER_STEP, next_power_of_2(most_pools))
    sizes = {"HEADS": heads, "D": dim, "BLOCK": block, "KEYS": 64 if q.element_size() == 2 else 32}
    for items, first, count, decode in _turns(index, width):
        queries = _queries(wide_heads, decode)
        programs = count if decode else count * (TOKEN_TILE // queries)
        wide = max(wide_heads, 16 // queries)
        splits = max(1, min(-(-width // sizes["KEYS"]), at_once // max(1, programs)))
        num_queries = count if decode else count * TOKEN_TILE
        options = {**form, "DECODE": decode}
        scores = torch.empty(num_queries, width, dtype=torch.int32, device=q.device)
        _scores_kernel[(programs * splits,)](
            *(q, weights, cache, scores, items, *rows, *table),
            *(first, index.block_table.stride(0), width, splits, *strides),
            **sizes,
            **options,
            QUERIES=queries,
            WIDE=wide,
            num_warps=4,
        )
        _choice_kernel[(num_queries,)](scores, chosen, items, *rows, first, width, **options, POOLS=step, num_warps=4)
    return chosen


def _queries(wide_heads: int, decode: bool) -> int:
    """Return the queries of a program that scores: of a tile, as many as have 64 heads together."""
    return 1 if decode else min(TOKEN_TILE, max(1, 64 // wide_heads))


def _turns(index: AttentionIndex, width: int) -> Iterator[tuple[Tensor, int, int, bool]]:
    """Yield (tiles, first decode row, number of rows or tiles, whether rows decode) of launches with few scores."""
    assert index.work is not None
    tiles, rows = index.work.tiles, max(1, SCORES_AT_ONCE // width)
    for first in range(0, index.num_decodes, rows):
        yield tiles, first, min(rows, index.num_decodes - first), True
    each = max(2, rows // TOKEN_TILE // 2 * 2)  # tiles of 8 bytes: parts start at multiples of 16 bytes
    for first in range(0, len(tiles), each):
        part = tiles[first : first + each]
        yield part, 0, len(part), False
