"""Attention of tiles of queries on a Hopper GPU, in Gluon: `prefill_kernel` with a warp that loads and groups that
multiply.

One warp of a program copies keys and values into a ring of tiles in shared memory. Two groups of four warps each hold
64 rows of queries. While one group computes exponentials, the matrix units multiply for the other. If there are too few
tiles of queries, several programs split the keys, as in `prefill_kernel`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forkpoint.ops.attention.prefill_kernel import _place, _share
from forkpoint.ops.attention.softmax import LOWEST, gated, shares
from forkpoint.ops.launch import await_inputs
from forkpoint.ops.metadata import TILE
from forkpoint.ops.rounding import ceil_div

PAGE = gl.constexpr(TILE)
COLUMNS = gl.constexpr(64)  # columns of a copy: the widest that a swizzle of 128 bytes allows
ROWS = gl.constexpr(64)  # rows of queries per group
GROUPS = gl.constexpr(2)
REGISTERS = gl.constexpr((240, 24))  # per thread of the second group and of the warp that loads; the first has the rest
TILE_ELEMENTS = 64 * 256  # the most of a tile of keys, whose scores and weights must fit in registers
RING_ELEMENTS = 2 * TILE_ELEMENTS  # the tiles of keys that shared memory holds, and as many of values


@gluon.jit
def _copy(tiles, boxes, arrived, freed, j, first, second, head, PAGES: gl.constexpr):
    """Copy the keys or the values of tile `j`, whose pages are `first` and `second`, when its place in the ring is
    free."""
    STAGES: gl.constexpr = arrived.shape[0]
    PARTS: gl.constexpr = boxes.shape[0] // (STAGES * PAGES)
    stage = j % STAGES
    here = arrived.index(stage)
    mbarrier.wait(freed.index(stage), (j // STAGES & 1) ^ 1)
    mbarrier.expect(here, PARTS * PAGES * tiles.block_type.nbytes)
    for part in gl.static_range(PARTS):
        for page in gl.static_range(PAGES):
            box = boxes.index((stage * PARTS + part) * PAGES + page)
            block = second if page else first
            tma.async_copy_global_to_shared(tiles, [block, head, 0, part * COLUMNS], here, box)


@gluon.jit
def _produce(key_tiles, value_tiles, key_boxes, value_boxes, ring, table, head, num_keys, PAGES: gl.constexpr):
    """Copy the tiles of `num_keys` keys and values of one head into the ring, one after the other."""
    key_arrived, key_freed, value_arrived, value_freed = ring
    last = (num_keys - 1) // PAGE
    first, second = gl.load(table), gl.load(table + gl.minimum(PAGES - 1, last))
    for j in range(last // PAGES + 1):
        # The next pages are read before the program waits for the ring.
        next_first = gl.load(table + gl.minimum(PAGES * (j + 1), last))
        next_second = gl.load(table + gl.minimum(PAGES * (j + 2) - 1, last))
        _copy(key_tiles, key_boxes, key_arrived, key_freed, j, first, second, head, PAGES)
        _copy(value_tiles, value_boxes, value_arrived, value_freed, j, first, second, head, PAGES)
        first, second = next_first, next_second


@gluon.jit
def _seen(scores, position, first_key, SCORES: gl.constexpr):
    """Return the scores, with -inf for keys after a row's position."""
    key = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, SCORES))
    return gl.where(position[:, None] >= key[None, :], scores, float("-inf"))


@gluon.jit
def _clear_unstored(tile, stored, LOADED: gl.constexpr):
    """Set the values of a tile from row `stored` on to zero, because memory there may hold anything.

    Both groups do so, and write the same."""
    if stored < tile.shape[0]:
        kept = (gl.arange(0, tile.shape[0], gl.SliceLayout(1, LOADED)) < stored)[:, None]
        for c in gl.static_range(tile.shape[1] // COLUMNS):
            part = tile.slice(c * COLUMNS, COLUMNS, 1)
            part.store(gl.where(kept, part.load(LOADED), 0.0))
        fence_async_shared()


@gluon.jit
def _sums(
    queries,
    keys,
    values,
    ring,
    turns,
    before,
    first,
    num_keys,
    scale,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Return the sums (acc, l_i, m_i) of rows of queries over those of `num_keys` keys that they see, as
    `softmax.add_values` has them."""
    key_arrived, key_freed, value_arrived, value_freed = ring
    own_turn, other_turn = turns.index(HALF), turns.index(1 - HALF)
    D: gl.constexpr = queries.shape[1]
    STAGES: gl.constexpr = keys.shape[0]
    KEYS: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    position = before + first + (HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // GROUP
    end = (num_keys + KEYS - 1) // KEYS
    full = gl.minimum(end, (before + first + 1) // KEYS)  # tiles that all rows see whole
    acc = gl.zeros((ROWS, D), gl.float32, SUMS)
    none = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    l_i = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    m_i = gl.full((ROWS,), LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    mbarrier.wait(key_arrived.index(0), 0)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(key_freed.index(0))
    p, _, l_i, m_i = shares(l_i, m_i, _seen(scores, position, 0, SCORES), scale)
    weights = gl.convert_layout(p.to(queries.dtype), WEIGHTS)
    for masked in gl.static_range(2):
        from_tile, to_tile = 1, full
        if masked:
            from_tile, to_tile = gl.maximum(1, full), end
        for j in range(from_tile, to_tile):
            # The products with the values of the tile before run while this tile's exponentials are computed.
            stage, behind = j % STAGES, (j - 1) % STAGES
            mbarrier.wait(key_arrived.index(stage), j // STAGES & 1)
            mbarrier.wait(own_turn, (j + HALF) & 1)
            scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(value_arrived.index(behind), (j - 1) // STAGES & 1)
            acc = warpgroup_mma(weights, values.index(behind), acc, is_async=True)
            mbarrier.arrive(other_turn)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(key_freed.index(stage))
            if masked:
                scores = _seen(scores, position, j * KEYS, SCORES)
            p, alpha, l_i, m_i = shares(l_i, m_i, scores, scale)
            # The assembler moves no exponentials across a wait like this one, which ends at once. Without it, the wait
            # for products would come before most exponentials.
            mbarrier.wait(value_arrived.index(behind), (j - 1) // STAGES & 1)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(value_freed.index(behind))
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
            weights = gl.convert_layout(p.to(queries.dtype), WEIGHTS)
    tile = values.index((end - 1) % STAGES)
    mbarrier.wait(value_arrived.index((end - 1) % STAGES), (end - 1) // STAGES & 1)
    _clear_unstored(tile, num_keys - (end - 1) * KEYS, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    acc = warpgroup_mma(weights, tile, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, l_i, m_i


@gluon.jit
def _store_answer(out, gate, rows, acc, l_i, at, gate_at, present, SUMS: gl.constexpr, LOADED: gl.constexpr):
    """Store the answer of sums, by way of shared memory `rows`, to rows `at` of `out`, gated by rows `gate_at`."""
    rows.store((acc / gl.convert_layout(l_i, gl.SliceLayout(1, SUMS))[:, None]).to(rows.dtype))
    for c in gl.static_range(rows.shape[1] // COLUMNS):
        part = rows.slice(c * COLUMNS, COLUMNS, 1).load(LOADED)
        column = (c * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LOADED)))[None, :]
        if gate is not None:
            part = gated(part, gl.load(gate + gate_at + column, mask=present, other=0.0)).to(rows.dtype)
        gl.store(out + at + column, part, mask=present)


@gluon.jit
def _consume(
    tensors,
    memory,
    where,
    share,
    strides,
    scale,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Attend with rows `[HALF * ROWS, (HALF + 1) * ROWS)` of a tile to the keys of a share that they see."""
    q, out, gate, acc_ptr, l_ptr, m_ptr = tensors
    queries, keys, values, ring, turns = memory
    before, first, last, start, kv_head, num_keys = where
    alone, share, num_splits = share
    q_token, q_head, gate_token = strides
    D: gl.constexpr = queries.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m, at = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED)), gl.arange(0, D, gl.SliceLayout(0, LOADED))
    token, head = (start + first + m // GROUP).to(gl.int64), kv_head * GROUP + m % GROUP
    present = m < (last - first) * GROUP
    rows = queries.index(HALF)
    q_at = q + (token * q_token + head * q_head)[:, None] + at[None, :]
    rows.store(gl.load(q_at, mask=present[:, None], other=0.0))
    fence_async_shared()
    acc, l_i, m_i = _sums(rows, keys, values, ring, turns, before, first, num_keys, scale, HALF, GROUP, SUMS)
    out_at, gate_at = ((token * (HEADS * GROUP) + head) * D)[:, None], (token * gate_token + head * D)[:, None]
    if SPLIT:
        if alone:
            _store_answer(out, gate, rows, acc, l_i, out_at, gate_at, present[:, None], SUMS, LOADED)
        else:
            entry = (token * num_splits + share) * (HEADS * GROUP) + head
            gl.store(l_ptr + entry, gl.convert_layout(l_i, gl.SliceLayout(1, LOADED)), mask=present)
            gl.store(m_ptr + entry, gl.convert_layout(m_i, gl.SliceLayout(1, LOADED)), mask=present)
            # The same entries in the layout of `acc`.
            own = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
            own_line = (start + first + own // GROUP).to(gl.int64) * num_splits + share
            own_entry = own_line * (HEADS * GROUP) + kv_head * GROUP + own % GROUP
            acc_at = acc_ptr + (own_entry * D)[:, None] + gl.arange(0, D, gl.SliceLayout(0, SUMS))[None, :]
            gl.store(acc_at, acc, mask=(own < (last - first) * GROUP)[:, None])
    else:
        _store_answer(out, gate, rows, acc, l_i, out_at, gate_at, present[:, None], SUMS, LOADED)


@gluon.jit(do_not_specialize=["num_tiles", "num_splits", "table_stride", "gate_token"])
def prefill_warps_kernel(
    q,
    key_tiles,
    value_tiles,
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
    scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Attend with QUERIES queries of one tile and all query heads of one key head to all keys or (SPLIT) a share of
    them, as `prefill_kernel` does. Shares are whole tiles of KEYS keys.

    `key_tiles` and `value_tiles` describe pages of the cache, `[block, head, PAGE, D]`, in boxes of COLUMNS columns.
    Without SPLIT, late tiles see the most keys and start first. With SPLIT, tiles of padding are the last to start.
    """
    await_inputs(OVERLAP)
    SUBS: gl.constexpr = (PAGE + QUERIES - 1) // QUERIES
    PAGES: gl.constexpr = KEYS // PAGE
    kv_head, rest = gl.program_id(0) % HEADS, gl.program_id(0) // HEADS
    if SPLIT:
        own, share = rest // num_splits, rest % num_splits
    else:
        own, share = num_tiles * SUBS - 1 - rest, 0
    row, first, last, start, before, low, end = _place(
        tiles, cu_queries, kv_lens, own // SUBS, own % SUBS, None, QUERIES, KEYS
    )
    alone = True
    if SPLIT:
        alone, low, end = _share(low, end, share, num_splits)
    if (first >= last) | (low >= end):
        return
    # From here on, keys and pages are counted from the share's first one.
    num_keys, before = gl.minimum(end * KEYS, before + last) - low * KEYS, before - low * KEYS
    table = block_table + gl.load(table_rows + row).to(gl.int64) * table_stride + low * PAGES
    dtype: gl.constexpr = q.dtype.element_ty
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    HELD: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BOXES: gl.constexpr = [STAGES * D * KEYS // (COLUMNS * PAGE), 1, 1, PAGE, COLUMNS]
    queries = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D], HELD)
    keys = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], HELD)
    values = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], HELD)
    key_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    key_freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    value_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    value_freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(key_arrived.index(i), count=1)
        mbarrier.init(key_freed.index(i), count=GROUPS)
        mbarrier.init(value_arrived.index(i), count=1)
        mbarrier.init(value_freed.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    ring = (key_arrived, key_freed, value_arrived, value_freed)
    tensors, strides = (q, out, gate, acc_ptr, l_ptr, m_ptr), (q_token, q_head, gate_token)
    memory, where = (queries, keys, values, ring, turns), (before, first, last, start, kv_head, num_keys)
    shared = (alone, share, num_splits)
    key_boxes = keys._reinterpret(dtype, BOXES, key_tiles.layout)
    value_boxes = values._reinterpret(dtype, BOXES, value_tiles.layout)
    gl.warp_specialize(
        [
            (_consume, (tensors, memory, where, shared, strides, scale, 0, HEADS, GROUP, SPLIT)),
            (_consume, (tensors, memory, where, shared, strides, scale, 1, HEADS, GROUP, SPLIT)),
            (_produce, (key_tiles, value_tiles, key_boxes, value_boxes, ring, table, kv_head, num_keys, PAGES)),
        ],
        [4, 1],
        REGISTERS,
    )


def prefill_warps(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    operands: tuple[Any, ...],
    num_splits: int,
    queries: int,
    gate_token: int,
    scale: float,
    most_keys: int,
    options: dict[str, Any],
) -> int:
    """Launch the kernel over the tiles of one step, with `queries` queries of a program and up to `most_keys` keys of a
    tile: one page or two.

    `operands` are its arguments from `out` to `block_table`, and `options` those of the launch. Returns the number of
    keys of a tile."""
    (_, heads, dim), kv_heads = q.shape, caches[0].shape[1]
    tiles, table, group = operands[-5], operands[-1], heads // kv_heads
    assert queries * group <= GROUPS.value * ROWS.value, "a program has more rows than its groups of warps"
    layout, box = gl.NVMMASharedLayout(128, 16, 4), [1, 1, TILE, COLUMNS.value]
    described = (TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout) for x in caches)
    counts = (tiles.shape[0], num_splits, table.stride(0), gate_token, *q.stride()[:2])
    keys = min(most_keys, TILE_ELEMENTS // dim)
    sizes = {"HEADS": kv_heads, "GROUP": group, "D": dim, "QUERIES": queries, "KEYS": keys}
    sizes |= {"STAGES": RING_ELEMENTS // (keys * dim), "SPLIT": num_splits > 1, "num_warps": 4}
    programs = tiles.shape[0] * kv_heads * ceil_div(TILE, queries) * num_splits
    prefill_warps_kernel[(programs,)](q, *described, *operands, *counts, scale, **sizes, **options)
    return keys
