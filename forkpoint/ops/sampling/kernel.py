"""The largest logit, penalties and bitmasks in Triton: one program per tile of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap, straight
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.ops.sampling.columns import PenaltyColumns

GREEDY_TILE = 4096
ELEMENTWISE_TILE = 4096
MIN_TOP = 32  # ids that are sorted at least, so that every usual number of log-probabilities runs one kernel
RANK_TILE = 4096  # ids that a program of a whole row reads together


@triton.jit
def _tile_top_kernel(
    logits, tops, places, stride, vocab, num_tiles, TILE: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Store a tile's largest logit (inf if any is NaN) and its lowest id."""
    await_inputs(OVERLAP)
    row, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x)
    tl.store(tops + row * num_tiles + tile, top)
    tl.store(places + row * num_tiles + tile, tl.min(tl.where(x == top, at, vocab - 1)))


@triton.jit
def _top_kernel(tops, places, token_ids, finite, vocab, num_tiles, TILES: tl.constexpr, OVERLAP: tl.constexpr):
    await_inputs(OVERLAP)
    row = tl.program_id(0)
    at = tl.arange(0, TILES)
    top = tl.load(tops + row * num_tiles + at, mask=at < num_tiles, other=float("-inf"))
    place = tl.load(places + row * num_tiles + at, mask=at < num_tiles, other=vocab - 1)
    best = tl.max(top)
    tl.store(token_ids + row, tl.min(tl.where(top == best, place, vocab - 1)).to(tl.int64))
    tl.store(finite + row, (best < float("inf")) & (best > float("-inf")))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids `[N]` int64 of the largest logits of `logits[N, V]`, the lowest id among equals, and whether the
    largest is finite, `[N]` bool."""
    num_rows, vocab = logits.shape
    device, num_tiles = logits.device, ceil_div(vocab, GREEDY_TILE)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return token_ids, finite
    tops = torch.empty(num_rows * num_tiles, dtype=torch.float32, device=device)
    places = torch.empty(num_rows * num_tiles, dtype=torch.int32, device=device)
    stride, options = dense_rows(logits), overlap(device, num_rows)
    _tile_top_kernel[(num_rows * num_tiles,)](
        logits, tops, places, stride, vocab, num_tiles, TILE=GREEDY_TILE, **options, num_warps=4
    )
    tiles = next_power_of_2(num_tiles)
    _top_kernel[(num_rows,)](tops, places, token_ids, finite, vocab, num_tiles, TILES=tiles, **options, num_warps=1)
    return token_ids, finite


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=("token_ids",))
def _rank_kernel(
    logits, token_ids, ids, ranks, stride, vocab, num_top, TOP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Sort a row's `num_top` ids with the largest logits, equal logits by id, and compute the rank of its token.

    `ids` comes sorted by logit. Ids with the smallest of these logits are searched again, because a top-k cuts equal
    logits at an arbitrary id.
    """
    row = tl.program_id(0)
    line, own = logits + row.to(tl.int64) * stride, ids + row * num_top
    at = tl.arange(0, TOP)
    listed = at < num_top
    top = tl.load(own + at, mask=listed, other=0)
    least = tl.min(tl.load(line + top, mask=listed, other=float("inf")).to(tl.float32))
    count = tl.sum((tl.load(line + top, mask=listed, other=float("-inf")).to(tl.float32) > least).to(tl.int32))
    token_id = tl.load(token_ids + row)
    logit = tl.load(line + token_id).to(tl.float32)
    before = tl.zeros((TILE,), tl.int32)
    for first in range(0, vocab, TILE):
        here = first + tl.arange(0, TILE)
        x = tl.load(line + here, mask=here < vocab, other=float("-inf")).to(tl.float32)
        before += ((x > logit) | ((x == logit) & (here < token_id))).to(tl.int32)
        if count < num_top:
            equal = ((x == least) & (here < vocab)).to(tl.int32)
            num_equal = tl.sum(equal)
            if num_equal > 0:
                place = count + tl.cumsum(equal, axis=0) - 1
                tl.store(own + place, here.to(tl.int64), mask=(equal > 0) & (place < num_top))
                count += num_equal
    tl.store(ranks + row, tl.sum(before).to(tl.int64) + 1)
    tl.debug_barrier()
    top = tl.load(own + at, mask=listed, other=vocab)
    value = tl.load(line + top, mask=listed, other=float("-inf")).to(tl.float32)
    equal_before = (value[None, :] == value[:, None]) & (top[None, :] < top[:, None])
    place = tl.sum(((value[None, :] > value[:, None]) | equal_before).to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(own + place, top, mask=listed)


def top_ids(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Sort each row of `logits[N, V]` from the largest to the smallest, equal logits by id.

    Returns the first ids `[N, num_top]` int64, and the rank `[N]` int64, from 1, of `token_ids[N]`.
    """
    num_rows, vocab = logits.shape
    ids = torch.topk(logits, num_top, dim=1).indices
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        top = max(MIN_TOP, next_power_of_2(num_top))
        sizes = (dense_rows(logits), vocab, num_top)
        _rank_kernel[(num_rows,)](logits, token_ids, ids, ranks, *sizes, TOP=top, TILE=RANK_TILE, num_warps=8)
    return ids, ranks


@triton.jit(do_not_specialize_on_alignment=("rows", "lines", "repetition", "frequency", "presence"))
def _penalty_kernel(
    logits, counts, rows, lines, repetition, frequency, presence, stride, line_stride, vocab, num_tiles,
    TILE: tl.constexpr,
):  # fmt: skip
    entry, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < vocab
    place = logits + tl.load(rows + entry) * stride + at
    count = tl.load(counts + tl.load(lines + entry) * line_stride + at, mask=inside, other=0)
    x = tl.load(place, mask=inside, other=0.0)
    factor = tl.load(repetition + entry)
    x = tl.where(count > 0, tl.where(x > 0, x / factor, x * factor), x)
    outputs = count >> 1
    x = x - tl.load(frequency + entry) * outputs.to(tl.float32)
    x = x - tl.where(outputs > 0, tl.load(presence + entry), 0.0)
    tl.store(place, x, mask=inside)


def apply_penalties(logits: Tensor, counts: Tensor, columns: PenaltyColumns) -> None:
    """Apply penalties to `logits[N, V]` fp32 in place, with the counts that PenaltyColumns describes."""
    num_tiles = ceil_div(logits.shape[1], ELEMENTWISE_TILE)
    operands = (logits, counts, columns.rows, columns.lines, columns.repetition, columns.frequency, columns.presence)
    sizes = (dense_rows(logits), dense_rows(counts), logits.shape[1], num_tiles)
    _penalty_kernel[(len(columns.rows) * num_tiles,)](*operands, *sizes, TILE=ELEMENTWISE_TILE, num_warps=4)


@triton.jit
def _bitmask_kernel(
    logits, rows, bits, stride, vocab, num_words, num_tiles, TILE: tl.constexpr, STRAIGHT: tl.constexpr
):  # fmt: skip
    entry, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    at = tile * TILE + tl.arange(0, TILE)
    if STRAIGHT:
        words = tile * (TILE // 32) + tl.arange(0, TILE // 32)
        word = tl.load(bits + entry * num_words + words, mask=words < num_words, other=-1)
        word = tl.reshape(tl.broadcast_to(word[:, None], (TILE // 32, 32)), (TILE,))
    else:
        word = tl.load(bits + entry * num_words + at // 32, mask=at < vocab, other=-1)
    place = logits + tl.load(rows + entry) * stride + at
    x = tl.load(place, mask=at < vocab, other=0.0)
    tl.store(place, tl.where(((word >> (at % 32)) & 1) == 0, float("-inf"), x), mask=at < vocab)


def apply_bitmasks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of ids whose bit is 0 to -inf, in place: `logits[N, V]` fp32, `rows[M]` int64,
    `bits[M, ceil(V / 32)]` int32, id `i` at bit `i % 32` of word `i // 32`."""
    num_tiles = ceil_div(logits.shape[1], ELEMENTWISE_TILE)
    sizes = (dense_rows(logits), logits.shape[1], bits.shape[1], num_tiles)
    options = {"TILE": ELEMENTWISE_TILE, "num_warps": 4, **straight(logits.device)}
    _bitmask_kernel[(len(rows) * num_tiles,)](logits, rows, bits, *sizes, **options)


def dense_rows(x: Tensor) -> int:
    """Return the row stride of `x[N, V]`, whose rows must be contiguous."""
    assert x.stride(1) == 1, f"the last dim must be dense; strides are {x.stride()}"
    return x.stride(0)
