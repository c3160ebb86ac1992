"""The likeliest id of a row, for drafts, in Triton, without reading the whole output head.

A copy of the head in four bits (e2m1) names CANDIDATES ids per row, and the head's own weights choose among them. The
choice is nearly always exact. A draft may be any id, because it is verified, so no output depends on a miss.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_before, await_inputs, overlap, start_next
from forkpoint.ops.linear.fp8_kernel import narrow
from forkpoint.ops.linear.scaled import LEAST_AMAX
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.platforms.table import traits_of

TILE = tl.constexpr(128)  # ids per tile, of which at most one is named
CANDIDATES: Final = 16  # named ids per row: one from each group of tiles whose numbers are equal modulo 16
UNIT: Final = 256  # columns; their two halves are one step of every tile
E2M1_MAX: Final = 6.0
E2M1_TO_E4M3: Final = 64.0  # an e2m1 code placed in the bits of e4m3 is smaller by this factor
_BETWEEN: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints between adjacent magnitudes of e2m1
_PIECE_ROWS: Final = 4096  # rows packed together, which bounds the memory at load
_NONE = tl.constexpr(-(1 << 31))


_HALF = """
{
.reg .b32 %%half, %%size;
shl.b32 %%half, $1, %d;
shr.b32 %%size, %%half, 2;
and.b32 %%size, %%size, 0x1c1c1c1c;
and.b32 %%half, %%half, 0x80808080;
or.b32 $0, %%half, %%size;
}
"""
_HIGHER, _LOWER = tl.constexpr(_HALF % 0), tl.constexpr(_HALF % 4)


@triton.jit
def e4m3_of(codes, HIGH: tl.constexpr, BITS: tl.constexpr):
    """Return the lower or the higher half of each byte as e4m3: sign, two exponent bits, the first fraction bit.

    With BITS, four bytes are converted at a time."""
    if BITS:
        half: tl.constexpr = _HIGHER if HIGH else _LOWER
        wide = tl.inline_asm_elementwise(half, "=r,r", [codes], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        wide = codes if HIGH else codes << 4
        wide = (wide & 0x80) | ((wide >> 2) & 0x1C)
    return wide.to(tl.float8e4nv, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x,
    codes,
    scales,
    keys,
    num_rows,
    num_ids,
    half,
    num_tiles,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find the likeliest of TILE ids for each of ROWS rows.

    Stores a key with the order of the logits, whose lowest bits hold the place of the first likeliest id. x `[M, 2
    half]` is e4m3 without its scales, because a row's scale does not change the order."""
    await_before(OVERLAP)
    blocks = tl.cdiv(num_rows, ROWS)
    tile = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    ids, columns = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    x_at = x + rows.to(tl.int64)[:, None] * (2 * half) + columns[None, :]
    codes_at = codes + ids.to(tl.int64)[:, None] * half + columns[None, :]
    acc = tl.zeros((TILE, ROWS), tl.float32)
    for k in tl.range(0, half, WIDTH, num_stages=STAGES):
        low, high, code = tl.load(x_at + k), tl.load(x_at + k + half), tl.load(codes_at + k)
        acc = tl.dot(e4m3_of(code, False, BITS), tl.trans(low), acc)
        acc = tl.dot(e4m3_of(code, True, BITS), tl.trans(high), acc)
    start_next(OVERLAP)
    bits = (acc * tl.load(scales + ids)[:, None]).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (key & -TILE) | (tl.arange(0, TILE) ^ (TILE - 1))[:, None]
    key = tl.max(tl.where((ids < num_ids)[:, None], key, _NONE), axis=0)
    tl.store(keys + rows.to(tl.int64) * num_tiles + tile, key, mask=rows < num_rows)


@triton.jit
def _choose_kernel(
    keys,
    hidden,
    weight,
    token_ids,
    logits,
    num_ids,
    num_tiles,
    width: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Choose a row's id: the likeliest id of each group of tiles, then the likeliest of these by the head's weights."""
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILES // CANDIDATES)[:, None] * CANDIDATES + tl.arange(0, CANDIDATES)[None, :]
    key = tl.load(keys + row * num_tiles + at, mask=at < num_tiles, other=_NONE)
    best, place = tl.max(key, axis=0, return_indices=True)
    tile = place * CANDIDATES + tl.arange(0, CANDIDATES)
    ids = tl.where(best > _NONE, tile * TILE + ((best & (TILE - 1)) ^ (TILE - 1)), -1)
    columns, named = tl.arange(0, WIDTH), ids >= 0
    line = weight + ids.to(tl.int64)[:, None] * width + columns[None, :]
    acc = tl.zeros((CANDIDATES, WIDTH), tl.float32)
    for k in tl.static_range(0, width, WIDTH):  # unrolled, so that all loads are in flight together
        x = tl.load(hidden + row * width + k + columns).to(tl.float32)
        acc += tl.load(line + k, mask=named[:, None], other=0.0).to(tl.float32) * x[None, :]
    logit = tl.where(named, tl.sum(acc, axis=1), float("-inf"))
    top = tl.max(logit)
    likeliest = tl.min(tl.where(named & (logit == top), ids, num_ids - 1))
    tl.store(token_ids + row, tl.maximum(likeliest, 0).to(tl.int64))  # a valid id even if no logit is finite
    tl.store(logits + row, top)


def _tile(num_rows: int) -> Tile:
    if num_rows > 64:
        return Tile(128, TILE.value, 64, 8, 4)
    return Tile(max(16, next_power_of_2(num_rows)), TILE.value, 128, 4, 3)


class Shortlist:
    """The head's copy in e2m1: `codes[ids, K / 2]`, with column `k` in a byte's lower half and `k + K / 2` in its
    higher half, and one scale per id, from its largest element."""

    def __init__(self, weight: Tensor, num_ids: int) -> None:
        """Pack `weight[N, K]`, with K a multiple of UNIT, whose first `num_ids` rows are ids."""
        width, self._num_tiles = weight.shape[1], max(1, ceil_div(num_ids, TILE.value))
        self._weight, self._num_ids = weight, num_ids
        rows = self._num_tiles * TILE.value
        self._codes = torch.zeros(rows, width // 2, dtype=torch.uint8, device=weight.device)
        self._scales = torch.zeros(rows, dtype=torch.float32, device=weight.device)
        between = torch.tensor(_BETWEEN, device=weight.device)
        for start in range(0, num_ids, _PIECE_ROWS):
            piece = weight[start : min(start + _PIECE_ROWS, num_ids)].float()
            scale = piece.abs().amax(1).clamp_min(LEAST_AMAX) / E2M1_MAX
            sized = torch.bucketize((piece / scale[:, None]).abs(), between).to(torch.uint8)
            code = sized | ((piece < 0).to(torch.uint8) << 3)
            here = slice(start, start + len(piece))
            self._codes[here] = code[:, : width // 2] | (code[:, width // 2 :] << 4)
            self._scales[here] = scale * E2M1_TO_E4M3

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest ids `[R]` int64 of `hidden[R, K]` and their logits `[R]` fp32, -inf where there is no
        id."""
        hidden = hidden.contiguous()
        (num_rows, width), device = hidden.shape, hidden.device
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
        logits = torch.empty(num_rows, dtype=torch.float32, device=device)
        if not num_rows:
            return token_ids, logits
        tile, options = _tile(num_rows), overlap(device, num_rows)
        codes, _ = narrow(hidden, width, tile.rows)
        keys = torch.empty(num_rows, self._num_tiles, dtype=torch.int32, device=device)
        form = {
            "ROWS": tile.rows,
            "WIDTH": tile.width,
            "STAGES": tile.num_stages,
            "BITS": traits_of(device).multiplies_fp8,
        }
        _tile_kernel[(self._num_tiles * ceil_div(num_rows, tile.rows),)](
            *(codes, self._codes, self._scales, keys, num_rows, self._num_ids, width // 2, self._num_tiles),
            **form,
            **options,
            num_warps=tile.num_warps,
        )
        tiles = max(CANDIDATES, next_power_of_2(self._num_tiles))
        columns = UNIT * (2 if width % (2 * UNIT) == 0 else 1)
        _choose_kernel[(num_rows,)](
            *(keys, hidden, self._weight, token_ids, logits, self._num_ids, self._num_tiles, width),
            **{"TILES": tiles, "CANDIDATES": CANDIDATES, "WIDTH": columns, **options},
            num_warps=4 if width <= 4096 else 8,  # a program holds all columns in registers
        )
        return token_ids, logits


def shortlist(weight: Tensor, num_ids: int) -> Shortlist | None:
    """Return a function to the likeliest ids under `weight[N, K]`, of which `num_ids` rows are ids (`OpTable`).

    None unless the weight is bfloat16, K a multiple of UNIT, and the device multiplies FP8.
    """
    fits = weight.dtype == torch.bfloat16 and weight.shape[1] % UNIT == 0
    return Shortlist(weight.contiguous(), num_ids) if fits and traits_of(weight.device).multiplies_fp8 else None
