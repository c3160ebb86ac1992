"""Copies between slots in Triton: all pools in one launch, as raw bits."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.rounding import ceil_div
from forkpoint.platforms.table import traits_of

PIECE = 8192  # bytes per program and load
_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit
def _copy_piece(
    item, pools, src, dst, unit, num_pools, pieces, PIECE: tl.constexpr, BYTES: tl.constexpr, ALIGN: tl.constexpr
):
    """Copy one piece of one slot. `pools[num_pools, 3]` int64: address, stride of a slot in bytes, bytes of a slot.

    `unit` has the dtype of a word. Addresses are 64-bit integers and become pointers one by one, because triton-ascend
    rejects vectors of pointers.
    """
    entry, rest = item // (num_pools * pieces), item % (num_pools * pieces)
    pool, first = pools + (rest // pieces) * 3, (rest % pieces) * PIECE
    address, stride, size = tl.load(pool), tl.load(pool + 1), tl.load(pool + 2)
    source, target = tl.load(src + entry).to(tl.int64), tl.load(dst + entry).to(tl.int64)
    if (target >= 0) & (first < size):
        at = first // BYTES + tl.arange(0, PIECE // BYTES)
        # The hints let the compiler copy whole vectors. It must also know that the mask changes only at vector bounds.
        inside = at < tl.multiple_of(size // BYTES, ALIGN // BYTES)
        place = (address + target * stride).to(unit.dtype)
        words = tl.zeros((PIECE // BYTES,), unit.dtype.element_ty)
        if source >= 0:
            origin = tl.multiple_of((address + source * stride).to(unit.dtype), ALIGN)
            words = tl.load(origin + at, mask=inside, other=0)
        tl.store(tl.multiple_of(place, ALIGN) + at, words, mask=inside)


@triton.jit(do_not_specialize=["num_items"])
def _copy_kernel(
    pools,
    src,
    dst,
    unit,
    num_pools,
    pieces,
    num_items,
    PIECE: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Copy one piece, or several with TURNS. A loop of one turn would cost a GPU 3 %."""
    if TURNS:
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            _copy_piece(item, pools, src, dst, unit, num_pools, pieces, PIECE, BYTES, ALIGN)
    else:
        _copy_piece(tl.program_id(0), pools, src, dst, unit, num_pools, pieces, PIECE, BYTES, ALIGN)


class StateCopy:
    """The `state_copy` operator: copies slots `src` to slots `dst` in all pools. A src of -1 gives zeros.

    It keeps a table of addresses on the device for each set of pools it has seen. With more pieces than `most_programs`
    (default: the device's limit), programs copy several pieces in turn.
    """

    def __init__(self, most_programs: int | None = None) -> None:
        self._most_programs = most_programs
        self._tables: dict[tuple[int, ...], tuple[Tensor, Tensor, int, int]] = {}

    def __call__(self, pools: list[Tensor], src: Tensor, dst: Tensor) -> None:
        if not len(src):
            return
        key = tuple(value for pool in pools for value in (pool.data_ptr(), pool.stride(0), pool[0].numel()))
        if key not in self._tables:
            self._tables[key] = _describe(pools)
        table, unit, widest, align = self._tables[key]
        pieces = ceil_div(widest, PIECE)
        items, word = len(src) * len(pools) * pieces, unit.element_size()
        most = self._most_programs or traits_of(src.device).most_programs or items
        sizes = {"PIECE": PIECE, "BYTES": word, "ALIGN": align, "TURNS": items > most}
        _copy_kernel[(min(items, most),)](table, src, dst, unit, len(pools), pieces, items, **sizes, num_warps=8)


def _describe(pools: list[Tensor]) -> tuple[Tensor, Tensor, int, int]:
    """Return (table on the device, a tensor with the word's dtype, bytes of the widest slot, alignment in bytes)."""
    rows = []
    for pool in pools:
        assert pool[0].is_contiguous(), f"a slot must be dense; pool strides are {pool.stride()}"
        size = pool.element_size()
        rows.append((pool.data_ptr(), pool.stride(0) * size, pool[0].numel() * size))
    align = math.gcd(16, *(value for row in rows for value in row))
    unit = torch.empty(1, dtype=_UNITS[min(align, 4)], device=pools[0].device)
    table = torch.tensor(rows, dtype=torch.int64, device=pools[0].device)
    return table, unit, max(row[2] for row in rows), align
