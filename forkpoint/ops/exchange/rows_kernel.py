"""All-reduces and all-gathers of many rows between devices that can write to each other's memory, one kernel each.

A rank writes each row into an inbox on each other rank, and then the number of the exchange as the row's flag. Half as
many bytes cross the link as with numbered words (kernel.py), but a flag can leave only after its data have arrived. The
kernels also run in CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.exchange.kernel import Inboxes, Own, end, halves, joined, load_pairs, own_words, store_norm
from forkpoint.ops.launch import await_before, overlap, start_next
from forkpoint.ops.linear.fp8_kernel import written_beside
from forkpoint.ops.rounding import next_power_of_2

MOST_ROWS = 4096  # rows per launch; each has a place in the inbox
WIDEST = 4096  # words per row at most
PLACE_WORDS = tl.constexpr(WIDEST)
PROGRAMS = 528  # programs at most; the same program always handles a row


@triton.jit
def _inbox(ends, rank):
    """Return the address of the inbox of `rank`, as an int32 pointer."""
    return tl.multiple_of(tl.load(ends.addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _place(number, sender, receiver, SIZE: tl.constexpr):
    """Return the half of the receiver's inbox that `sender` writes. Halves alternate, so that the last one can be
    read."""
    return (number & 1) * (SIZE - 1) + (sender + SIZE - receiver - 1) % SIZE


@triton.jit
def _send(own, at, inside, row, number, ends, MOST_ROWS: tl.constexpr):
    """Send a row to all other ranks, then its flags."""
    for rank in tl.static_range(ends.size):
        if rank != ends.rank:
            place = _place(number, ends.rank, rank, ends.size) * MOST_ROWS + row
            tl.store(_inbox(ends, rank) + place * PLACE_WORDS + at, own, mask=inside)
    tl.debug_barrier()  # wait until all threads have written
    flags: tl.constexpr = 2 * (ends.size - 1) * MOST_ROWS * PLACE_WORDS
    for rank in tl.static_range(ends.size):
        if rank != ends.rank:
            place = _place(number, ends.rank, rank, ends.size) * MOST_ROWS + row
            tl.atomic_xchg(_inbox(ends, rank) + flags + place, number, sem="release", scope="sys")


@triton.jit
def _receive(rank, at, inside, row, number, ends, MOST_ROWS: tl.constexpr):
    """Wait for the row of `rank` and return it."""
    inbox, place = _inbox(ends, ends.rank), _place(number, rank, ends.rank, ends.size) * MOST_ROWS + row
    flags: tl.constexpr = 2 * (ends.size - 1) * MOST_ROWS * PLACE_WORDS
    while tl.atomic_add(inbox + flags + place, 0, sem="acquire", scope="sys") != number:
        pass
    return tl.load(inbox + place * PLACE_WORDS + at, mask=inside, other=0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    own,
    residual,
    weight,
    to,
    ends,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Exchange rows of WIDTH words one after another.

    Concatenates the ranks' rows. With a residual, adds the sum of their bfloat16 numbers to it and stores its norm."""
    NORMS: tl.constexpr = residual is not None
    at, program = tl.arange(0, COUNT), tl.program_id(0)
    inside = at < WIDTH
    if NORMS:
        weights = load_pairs(weight, at, inside)
    await_before(OVERLAP)
    number = tl.load(ends.numbers + program) + 1
    for row in range(program, num_rows, PROGRAMS):
        index = row * WIDTH + at
        words = own_words(own, row, at, inside)
        _send(words, at, inside, row, number, ends, MOST_ROWS)
        if NORMS:
            side_low, side_high = halves(tl.load(residual + index, mask=inside, other=0))
            low, high = tl.zeros((COUNT,), tl.float32), tl.zeros((COUNT,), tl.float32)
        for rank in tl.static_range(ends.size):  # in this order, so that all ranks get the same bits
            found = words
            if rank != ends.rank:
                found = _receive(rank, at, inside, row, number, ends, MOST_ROWS)
            if NORMS:
                more_low, more_high = halves(found)
                low += more_low
                high += more_high
            else:
                tl.store(to[0] + index + (row * (ends.size - 1) + rank) * WIDTH, found, mask=inside)
        if NORMS:
            low, high = halves(joined(low, high))
            total = joined(low + side_low, high + side_high)
            tl.store(residual + index, total, mask=inside)
            store_norm(total, weights, to, row, at, inside, WIDTH, eps)
    end(number, ends)
    start_next(OVERLAP)


def inbox_words(size: int) -> int:
    """Return the size of one rank's inbox, in int32 words, with `size` ranks."""
    return 2 * (size - 1) * MOST_ROWS * (WIDEST + 1)


def takes(x: Tensor) -> bool:
    """Return whether rows of `x[T, D]` can be exchanged."""
    return x.dim() == 2 and takes_row(x.shape[-1] * x.element_size())


def takes_row(num_bytes: int) -> bool:
    """Return whether a row of `num_bytes` can be exchanged."""
    return num_bytes % 4 == 0 and num_bytes <= 4 * WIDEST


def sum_add_rmsnorm(own: Own, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes, out: Tensor) -> Tensor:
    """Add the all-reduced, rounded bfloat16 `x[T, D]` to the residual in place; write the norm of the residual to
    `out`."""
    assert residual.is_contiguous(), f"strides are {residual.stride()}"
    codes, scales, padded_rows = written_beside(out)
    for part in _parts(residual):
        given, side = own.part(part), residual[part].view(torch.int32)
        beside = (None if codes is None else codes[part], None if scales is None else scales[part], padded_rows)
        operands = (given, side, weight, (out[part].view(torch.int32), *beside), inboxes, len(side), eps)
        _rows_kernel[(min(len(side), PROGRAMS),)](*operands, **_sizes(side))
    return out


def gather(own: Own, out: Tensor, inboxes: Inboxes) -> Tensor:
    """Return bfloat16 `out[T, size * D]` with the ranks' concatenated rows `[T, D]`."""
    for part in _parts(out):
        to = out[part].view(torch.int32)
        operands = (own.part(part), None, None, (to,), inboxes, len(to), None)
        _rows_kernel[(min(len(to), PROGRAMS),)](*operands, **_sizes(to, inboxes.size.value))
    return out


def _parts(x: Tensor) -> list[slice]:
    """Split the rows into slices that one launch can exchange."""
    return [slice(first, first + MOST_ROWS) for first in range(0, len(x), MOST_ROWS)]


def _sizes(words: Tensor, ranks: int = 1) -> dict[str, Any]:
    num_rows, width = len(words), words.shape[1] // ranks
    sizes = {"WIDTH": width, "COUNT": next_power_of_2(width), "PROGRAMS": PROGRAMS, "MOST_ROWS": MOST_ROWS}
    return {**sizes, "num_warps": 8, **overlap(words.device, num_rows)}
