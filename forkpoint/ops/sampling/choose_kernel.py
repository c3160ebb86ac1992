"""Random sampling in Triton: one launch over the tiles of all rows, then one program per row.

A bisection over the bits of the logits, not a sort, finds the smallest logit that top_k and top_p keep. It searches the
few candidates that the tiles' maxima allow, or the whole row if these do not decide it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import straight
from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.ops.sampling.columns import SamplingColumns
from forkpoint.ops.sampling.kernel import dense_rows

TILE = 2048
GROUP = 4  # tiles that a program reads together
FEW = 2048  # candidates that fit in registers
WIDE = 64  # tiles whose maxima bound the candidates of a row without top_k
STAGES = tl.constexpr(1)  # loads in flight
WARPS = 8
# Pointers to one number per row or tile, of any alignment. Otherwise each number of rows would compile its own kernel.
COLUMNS = ("temperature", "reach", "top_k", "top_p", "uniform", "tops", "masses")

_LOG2E = tl.constexpr(1.4426950408889634)
# low bits that are zero in the fp32 form of the dtype
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Return an int32 key with the order of fp32 values. Equal values have equal keys."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _weights(x, top, scale):
    return tl.exp2((x - top) * scale)


@triton.jit
def _invert(weights, target, at):
    """Return the first index whose cumulative weight exceeds `target`, or the last index with a positive weight."""
    total = tl.cumsum(weights, axis=0)
    behind = tl.min(tl.where((weights > 0) & (total > target), at, 2147483647))
    return tl.minimum(behind, tl.max(tl.where(weights > 0, at, 0)))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _tile_mass_kernel(logits, temperature, tops, masses, stride, vocab, num_tiles, TILE: tl.constexpr):
    """Store a tile's largest logit (inf if any is NaN) and the sum of its weights relative to it."""
    row, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x)
    scale = _LOG2E / tl.maximum(tl.load(temperature + row), 1e-30)
    known = (top < float("inf")) & (top > float("-inf"))
    mass = tl.sum(_weights(x, tl.where(known, top, 0.0), scale))
    tl.store(tops + row * num_tiles + tile, top)
    tl.store(masses + row * num_tiles + tile, tl.where(known, mass, 0.0))


@triton.jit
def _load_tiles(line, tiles, vocab, TILE: tl.constexpr):
    """Load ids and logits of several tiles, in the order of `tiles`; -1 stands for no tile."""
    at = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = (tiles >= 0)[:, None] & (at < vocab)
    x = tl.load(line + at, mask=inside, other=float("-inf")).to(tl.float32)
    return at, x, inside


@triton.jit
def _load(line, start, vocab, COUNT: tl.constexpr):
    """Load COUNT ids and logits from `start` on."""
    at = start + tl.arange(0, COUNT)
    x = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return at, x, at < vocab


@triton.jit
def _gather_candidates(
    line, low, hits, list_at, few_x, few_id, vocab,
    TILE: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr, STRAIGHT: tl.constexpr,
):  # fmt: skip
    """Store the tokens with logits of at least `low`, in the order of ids, up to FEW; return their number."""
    tile_at = tl.arange(0, hits.shape[0])
    tl.store(list_at + tl.cumsum(hits, axis=0) - 1, tile_at, mask=hits > 0)
    tl.debug_barrier()
    num_hits = tl.sum(hits)
    count = 0
    for first in range(0, num_hits, GROUP):
        entry = first + tl.arange(0, GROUP)
        if STRAIGHT:  # a tile at a time
            flat_at, flat_x, there = _load(line, tl.load(list_at + first) * TILE, vocab, TILE)
            take = (there & (flat_x >= low)).to(tl.int32)
        else:
            at, x, inside = _load_tiles(line, tl.load(list_at + entry, mask=entry < num_hits, other=-1), vocab, TILE)
            flat_x, flat_at = tl.reshape(x, (GROUP * TILE,)), tl.reshape(at, (GROUP * TILE,))
            take = tl.reshape((inside & (x >= low)).to(tl.int32), (GROUP * TILE,))
        place = count + tl.cumsum(take, axis=0) - 1
        tl.store(few_x + place, flat_x, mask=(take > 0) & (place < FEW))
        tl.store(few_id + place, flat_at, mask=(take > 0) & (place < FEW))
        count += tl.sum(take)
    tl.debug_barrier()
    return count


@triton.jit
def _row_boundary(
    line, low, high, limit, top, scale, vocab, COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the smallest key in (low, high] such that fewer than `limit` logits have at least that key (COUNT), or
    such that logits above the key weigh less than `limit`. Each pass over the row quarters the range."""
    while high - low > 1:
        step = tl.maximum((high - low) >> 2, 1)
        first, second, third = low + step, low + 2 * step, low + 3 * step
        one, two, three = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        in_one = tl.zeros((BLOCK,), tl.float32)
        in_two = tl.zeros((BLOCK,), tl.float32)
        in_three = tl.zeros((BLOCK,), tl.float32)
        for begin in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            _, x, _ = _load(line, begin, vocab, BLOCK)
            key = _key(x, SHIFT)
            if COUNT:
                in_one += tl.where(key >= one, 1.0, 0.0)
                in_two += tl.where(key >= two, 1.0, 0.0)
                in_three += tl.where(key >= three, 1.0, 0.0)
            else:
                weight = _weights(x, top, scale)
                in_one += tl.where(key > one, weight, 0.0)
                in_two += tl.where(key > two, weight, 0.0)
                in_three += tl.where(key > three, weight, 0.0)
        below_one, below_two, below_three = tl.sum(in_one) < limit, tl.sum(in_two) < limit, tl.sum(in_three) < limit
        high = tl.where(below_one, first, tl.where(below_two, second, tl.where(below_three, third, high)))
        low = tl.where(below_one, low, tl.where(below_two, first, tl.where(below_three, second, third)))
    return high


@triton.jit
def _threshold(line, floor_key, top_key, top, scale, k, p, whole, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest key kept, from passes over a row or its candidates. `whole` is the weight of which
    top_p keeps a share; if negative, it is the weight of the tokens that top_k leaves."""
    low = floor_key
    if k > 0:
        # With fewer than k logits left, `low` stays.
        end = _row_boundary(line, low, top_key + 1, k.to(tl.float32), top, scale, vocab, True, SHIFT, BLOCK)
        low = end - 1
    if p < 1.0:
        share = p * whole
        if whole < 0:
            mass = tl.zeros((BLOCK,), tl.float32)
            smallest = low.to(tl.int32)
            for begin in tl.range(0, vocab, BLOCK, num_stages=STAGES):
                _, x, _ = _load(line, begin, vocab, BLOCK)
                mass += tl.where(_key(x, SHIFT) >= smallest, _weights(x, top, scale), 0.0)
            share = p * tl.sum(mass)
        low = _row_boundary(line, low - 1, top_key, share, top, scale, vocab, False, SHIFT, BLOCK)
    return low


@triton.jit
def _choose_few(
    line, tile_top, low, closed, top, scale, k, p, share, total, list_at, few_x, few_id, vocab,
    SHIFT: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr, STRAIGHT: tl.constexpr,
):  # fmt: skip
    """Sample a token among those with logits of at least `low`.

    Returns -1 if these candidates are too many or do not decide what is kept. They decide it if `closed`, or if they
    have the share `p` of the row's weight `total`."""
    hits = (tile_top >= low).to(tl.int32)
    count = _gather_candidates(line, low, hits, list_at, few_x, few_id, vocab, TILE, GROUP, FEW, STRAIGHT)
    chosen = -1
    if count <= FEW:
        at = tl.arange(0, FEW)
        x = tl.load(few_x + at, mask=at < count, other=float("-inf"))
        weight = tl.where(at < count, _weights(x, top, scale), 0.0)
        if closed | (tl.sum(weight) >= p * total):
            key = _key(x, SHIFT)
            low_key = tl.max(_key(tl.full((1,), low, tl.float32), SHIFT)).to(tl.int64)
            top_key = tl.max(key).to(tl.int64)
            whole = tl.where(closed, -1.0, total)
            smallest = _threshold(few_x, low_key, top_key, top, scale, k, p, whole, count, SHIFT, FEW)
            kept = tl.where(key >= smallest, weight, 0.0)
            chosen = tl.load(few_id + _invert(kept, (share * tl.sum(kept)).to(tl.float32), at))
    return chosen


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _choose_kernel(
    logits, temperature, reach, top_k, top_p, uniform, tops, masses, lists, few_x, few_id, token_ids, finite,
    stride, vocab, num_tiles,
    SHIFT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, STRAIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    tile_at = tl.arange(0, TILES)
    tile_top = tl.load(tops + row * num_tiles + tile_at, mask=tile_at < num_tiles, other=float("-inf"))
    top = tl.max(tile_top)
    known = (top < float("inf")) & (top > float("-inf"))
    degree = tl.load(temperature + row)
    at_random = known & (degree > 0)
    scale = _LOG2E / tl.maximum(degree, 1e-30)
    floor = top + tl.load(reach + row)
    k = tl.load(top_k + row)
    k = tl.where(k < vocab, k, 0)
    p = tl.load(top_p + row)
    share = tl.load(uniform + row)
    mass = tl.load(masses + row * num_tiles + tile_at, mask=tile_at < num_tiles, other=0.0)
    mass = tl.where(mass > 0, mass * _weights(tile_top, top, scale), 0.0)
    top_key = tl.max(_key(tile_top, SHIFT)).to(tl.int64)
    threshold = tl.max(_key(tl.full((1,), float("-inf"), tl.float32), SHIFT)).to(tl.int64)
    chosen = -1
    searching = at_random & ((k > 0) | (p < 1.0) | (floor > float("-inf")))
    if searching:
        # At least as many tiles as wanted candidates have a maximum of at least `bound`.
        wanted = tl.where(k > 0, k, WIDE)
        ranks = tl.sum((tile_top[None, :] >= tile_top[:, None]).to(tl.int32), axis=1)
        bound = tl.max(tl.where(ranks >= wanted, tile_top, float("-inf")))
        closed = (k > 0) | (floor > float("-inf"))
        low = tl.where((k == 0) & closed, floor, tl.maximum(floor, bound))
        if low > float("-inf"):
            chosen = _choose_few(
                line, tile_top, low, closed, top, scale, k, p, share, tl.sum(mass), lists + row * TILES,
                few_x + row * FEW, few_id + row * FEW, vocab, SHIFT, TILE, GROUP, FEW, STRAIGHT,
            )  # fmt: skip
    if searching & (chosen < 0):
        # The first key not below `floor`, which need not be a value of the logits' dtype.
        floor_bits = tl.max(_key(tl.full((1,), floor, tl.float32), 0))
        floor_key = tl.where(floor_bits < 0, floor_bits >> SHIFT, (floor_bits + ((1 << SHIFT) - 1)) >> SHIFT)
        threshold = _threshold(line, floor_key.to(tl.int64), top_key, top, scale, k, p, -1.0, vocab, SHIFT, BLOCK)
        for first in tl.range(0, num_tiles, GROUP, num_stages=STAGES):
            tiles = first + tl.arange(0, GROUP)
            if STRAIGHT:
                at, x, inside = _load(line, first * TILE, vocab, TILE)
            else:
                at, x, inside = _load_tiles(line, tl.where(tiles < num_tiles, tiles, -1), vocab, TILE)
            kept = tl.where(inside & (_key(x, SHIFT) >= threshold.to(tl.int32)), _weights(x, top, scale), 0.0)
            if STRAIGHT:
                tl.store(masses + row * num_tiles + first, tl.sum(kept))
            else:
                tl.store(masses + row * num_tiles + tiles, tl.sum(kept, axis=1), mask=tiles < num_tiles)
        tl.debug_barrier()
        mass = tl.load(masses + row * num_tiles + tile_at, mask=tile_at < num_tiles, other=0.0)
    if at_random & (chosen < 0):
        exact = mass if STRAIGHT else mass.to(tl.float64)  # NPUs have no fp64
        target = share * tl.sum(exact)
        tile = _invert(exact, target, tile_at)
        rest = tl.maximum(target - tl.sum(tl.where(tile_at < tile, exact, 0.0)), 0.0).to(tl.float32)
        _, x, inside = _load(line, tile * TILE, vocab, TILE)
        weight = tl.where((_key(x, SHIFT) >= threshold) & inside, _weights(x, top, scale), 0.0)
        chosen = tile * TILE + _invert(weight, rest, tl.arange(0, TILE))
    if known & (degree == 0.0):
        tile = tl.min(tl.where(tile_top == top, tile_at, num_tiles - 1))
        at, x, _ = _load(line, tile * TILE, vocab, TILE)
        chosen = tl.min(tl.where(x == top, at, vocab - 1))
    tl.store(finite + row, known)
    tl.store(token_ids + row, tl.minimum(tl.maximum(chosen, 0), vocab - 1).to(tl.int64))


def sample_rows(logits: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """Sample one id per row of `logits[N, V]`, by the inverse CDF in the order of ids, among the tokens `columns` keep.

    Returns the ids `[N]` int64 and whether the largest logit is finite, `[N]` bool; without it the id means nothing.
    """
    num_rows, vocab = logits.shape
    device, num_tiles = logits.device, ceil_div(vocab, TILE)
    tiles = next_power_of_2(num_tiles)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return token_ids, finite
    tops, masses = torch.empty((2, num_rows * num_tiles), dtype=torch.float32, device=device)
    lists = torch.empty(num_rows * tiles, dtype=torch.int32, device=device)
    few_x = torch.empty(num_rows * FEW, dtype=torch.float32, device=device)
    few_id = torch.empty(num_rows * FEW, dtype=torch.int32, device=device)
    c, stride, form = columns, dense_rows(logits), straight(device)
    uniform = c.uniform.float() if form["STRAIGHT"] else c.uniform
    _tile_mass_kernel[(num_rows * num_tiles,)](
        logits, c.temperature, tops, masses, stride, vocab, num_tiles, TILE=TILE, num_warps=4
    )
    _choose_kernel[(num_rows,)](
        logits, c.temperature, c.reach, c.top_k, c.top_p, uniform, tops, masses, lists, few_x, few_id, token_ids,
        finite, stride, vocab, num_tiles,
        SHIFT=_DROPPED_BITS[logits.dtype], TILE=TILE, TILES=tiles, GROUP=1 if form["STRAIGHT"] else GROUP,
        FEW=FEW, WIDE=WIDE, BLOCK=launch_table(device).sample_block, **form, num_warps=WARPS,
    )  # fmt: skip
    return token_ids, finite
