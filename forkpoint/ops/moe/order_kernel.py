"""Sorting (token, choice) pairs by expert, and the tiles of products over them, in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.platforms.table import traits_of

FEW_PAIRS = 2048  # pairs; up to here one launch suffices, whose programs each read all pairs
FEW_ROWS, FEW_TILES = tl.constexpr(16), tl.constexpr(8)  # pairs and tiles per program of that launch
MAX_BLOCKS = 512
SUMMED_BLOCKS, SUMMED_EXPERTS = tl.constexpr(128), 16  # counts that a program adds up together
NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The order of pairs by expert, and the tiles of a product over them.

    `pairs[P]` int32 holds `token * top_k + choice`, sorted by expert and then by value. `tiles[3, NT]` int32 holds each
    tile's expert, its first place in `pairs`, and the end of its expert's places. A tile whose first place is not
    before the end is empty. Tiles of one expert are adjacent, the last expert's come first, and empty tiles come last.
    The last expert may serve all tokens; its tiles read the same weights, and if they came last, memory would be
    idle."""

    pairs: Tensor
    tiles: Tensor


@triton.jit
def rows_of_tile(pairs, begin, behind, choices, ROWS: tl.constexpr, INTO: tl.constexpr):
    """Return the rows that a tile of a product reads and writes, and which of them are inside: others repeat the last.

    The product into experts (INTO) reads tokens, of `choices` pairs each, and writes places in the order of pairs. The
    product out of experts reads places and writes pairs."""
    places = begin + tl.arange(0, ROWS)
    inside = places < behind
    places = tl.minimum(places, behind - 1)
    pair = tl.load(pairs + places)
    if INTO:
        return (pair // choices).to(tl.int64), places.to(tl.int64), inside
    else:
        return places.to(tl.int64), pair.to(tl.int64), inside


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids, counts, num_pairs, BLOCK: tl.constexpr, SUB: tl.constexpr, EXPERTS: tl.constexpr, OVERLAP: tl.constexpr
):
    await_inputs(OVERLAP)
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, BLOCK, SUB):
        at = block * BLOCK + start + tl.arange(0, SUB)
        chosen = tl.load(ids + at, mask=at < num_pairs, other=-1)
        total += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts + block * EXPERTS + experts, total)


@triton.jit(do_not_specialize=["num_blocks"])
def _sum_kernel(counts, num_blocks, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, OVERLAP: tl.constexpr):
    """Replace the counts of COLUMNS experts by the counts in earlier blocks; the totals follow the last block."""
    await_inputs(OVERLAP)
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, num_blocks, SUMMED_BLOCKS):
        block = start + tl.arange(0, SUMMED_BLOCKS)
        at, inside = counts + block[:, None] * EXPERTS + expert[None, :], (block < num_blocks)[:, None]
        own = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(own, 0) - own, mask=inside)
        total += tl.sum(own, 0)
    tl.store(counts + num_blocks * EXPERTS + expert, total)


@triton.jit
def _store_tiles(total, tiles, block, num_tiles, tile_rows, SUB: tl.constexpr, EXPERTS: tl.constexpr):
    """Store `SUB` tiles from tile `block * SUB` on, for experts with `total` pairs each."""
    experts = tl.arange(0, EXPERTS)
    first = tl.cumsum(total, 0) - total
    needed = (total + tile_rows - 1) // tile_rows
    behind = tl.cumsum(needed, 0)
    tile, full = block * SUB + tl.arange(0, SUB), tl.sum(needed, 0)
    number = tl.where(tile < full, full - 1 - tile, tile)
    expert = tl.sum((behind[None, :] <= number[:, None]).to(tl.int32), 1)
    here = expert[:, None] == experts[None, :]
    offset = first - (behind - needed) * tile_rows
    begin = tl.sum(tl.where(here, offset[None, :], 0), 1) + number * tile_rows
    end = tl.sum(tl.where(here, (first + total)[None, :], 0), 1)
    inside = tile < num_tiles
    tl.store(tiles + tile, expert, mask=inside)
    tl.store(tiles + num_tiles + tile, begin, mask=inside)
    tl.store(tiles + 2 * num_tiles + tile, end, mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "num_tiles", "tile_rows"])
def _order_kernel(
    ids,
    counts,
    pairs,
    tiles,
    num_pairs,
    num_blocks,
    num_tiles,
    tile_rows,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    total = tl.load(counts + num_blocks * EXPERTS + experts)
    if pid < num_blocks:
        place = tl.cumsum(total, 0) - total + tl.load(counts + pid * EXPERTS + experts)
        for start in range(0, BLOCK, SUB):
            at = pid * BLOCK + start + tl.arange(0, SUB)
            chosen = tl.load(ids + at, mask=at < num_pairs, other=-1)
            hit = (chosen[:, None] == experts[None, :]).to(tl.int32)
            rank = tl.sum(hit * (tl.cumsum(hit, 0) - hit + place[None, :]), 1)
            tl.store(pairs + rank, at, mask=at < num_pairs)
            place += tl.sum(hit, 0)
    else:
        _store_tiles(total, tiles, pid - num_blocks, num_tiles, tile_rows, SUB, EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "tile_rows"])
def _few_kernel(
    ids,
    pairs,
    tiles,
    num_pairs,
    num_tiles,
    tile_rows,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute pairs and tiles in one launch. A pair's place is the number of pairs before it in the order."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    num_blocks = tl.cdiv(num_pairs, FEW_ROWS)
    every = tl.arange(0, PAIRS)
    there = every < num_pairs
    chosen = tl.load(ids + every, mask=there, other=EXPERTS)
    if pid < num_blocks:
        at = pid * FEW_ROWS + tl.arange(0, FEW_ROWS)
        own = tl.load(ids + at, mask=at < num_pairs, other=EXPERTS) * PAIRS + at
        place = tl.sum(((chosen * PAIRS + every)[None, :] < own[:, None]).to(tl.int32), 1)
        tl.store(pairs + place, at, mask=at < num_pairs)
    else:
        total = tl.histogram(chosen, EXPERTS, mask=there)
        _store_tiles(total, tiles, pid - num_blocks, num_tiles, tile_rows, FEW_TILES, EXPERTS)


def order_by_expert(ids: Tensor, num_experts: int, tile_rows: int) -> ExpertOrder:
    """Return the pairs of contiguous `ids[T, top_k]` int32 sorted by expert, in tiles of `tile_rows` pairs.

    There are as many tiles as any routing needs.
    """
    num_pairs, sub = ids.numel(), launch_table(ids.device).order_pairs
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (tile_rows - 1)) // tile_rows
    padded = next_power_of_2(num_experts)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=ids.device)
    sizes = {"EXPERTS": padded, "num_warps": NUM_WARPS, **overlap(ids.device, ids.shape[0])}
    if num_pairs <= FEW_PAIRS and traits_of(ids.device).masks_gathers:
        grid = (ceil_div(num_pairs, FEW_ROWS.value) + ceil_div(num_tiles, FEW_TILES.value),)
        # 2, 8, 32, 128, 512 or 2,048: with few forms, a prompt of any length finds its own compiled.
        every = 1 << ((num_pairs - 1).bit_length() | 1)
        _few_kernel[grid](ids, pairs, tiles, num_pairs, num_tiles, tile_rows, PAIRS=every, **sizes)
        return ExpertOrder(pairs, tiles)
    block = sub * next_power_of_2(ceil_div(num_pairs, sub * MAX_BLOCKS))
    num_blocks = ceil_div(num_pairs, block)
    counts = torch.empty(num_blocks + 1, padded, dtype=torch.int32, device=ids.device)
    _count_kernel[(num_blocks,)](ids, counts, num_pairs, BLOCK=block, SUB=sub, **sizes)
    columns = min(SUMMED_EXPERTS, padded)
    _sum_kernel[(padded // columns,)](counts, num_blocks, COLUMNS=columns, **sizes)
    sizes |= {"BLOCK": block, "SUB": sub}
    grid = (num_blocks + ceil_div(num_tiles, sub),)
    _order_kernel[grid](ids, counts, pairs, tiles, num_pairs, num_blocks, num_tiles, tile_rows, **sizes)
    return ExpertOrder(pairs, tiles)
