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

from forkpoint.ops.exchange import MOST_ROW_BYTES
from forkpoint.ops.exchange.kernel import Inboxes, Own, end, halves, joined, load_pairs, own_words, store_norm
from forkpoint.ops.launch import await_before, overlap, start_next
from forkpoint.ops.linear.fp8_kernel import written_beside
from forkpoint.ops.rounding import next_power_of_2

MOST_ROWS = 4096  # rows per launch; each has a place in the inbox
WIDEST = MOST_ROW_BYTES // 4  # words per row at most
PLACE_WORDS = tl.constexpr(WIDEST)
PROGRAMS = 528  # programs at most; the same program always handles a row
WORDS_AT_ONCE = 4096  # words of rows that a program sends with one flag; two rows at least


@triton.jit
def _inbox(ends, rank):
    """Return the address of the inbox of `rank`, as an int32 pointer."""
    return tl.multiple_of(tl.load(ends.addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _place(number, sender, receiver, row, SIZE: tl.constexpr, MOST_ROWS: tl.constexpr):
    """Return the place of the row that `sender` writes in the receiver's inbox.

    Two places alternate, so that the row of the last exchange can still be read."""
    half = (number & 1) * (SIZE - 1) + (sender + SIZE - receiver - 1) % SIZE
    return half * MOST_ROWS + row


@triton.jit
def send(rank, words, at, inside, row, number, ends, MOST_ROWS: tl.constexpr):
    """Send the words `at` of a row to another rank. `send_flags` must follow."""
    place = _place(number, ends.rank, rank, row, ends.size, MOST_ROWS)
    tl.store(_inbox(ends, rank) + place * PLACE_WORDS + at, words, mask=inside)


@triton.jit
def send_flags(row, number, ends, MOST_ROWS: tl.constexpr):
    """Tell all other ranks that this program has sent the row."""
    tl.debug_barrier()  # wait until all threads have written
    flags: tl.constexpr = 2 * (ends.size - 1) * MOST_ROWS * PLACE_WORDS
    for rank in tl.static_range(ends.size):
        if rank != ends.rank:
            place = _place(number, ends.rank, rank, row, ends.size, MOST_ROWS)
            tl.atomic_xchg(_inbox(ends, rank) + flags + place, number, sem="release", scope="sys")


@triton.jit
def _row_from(rank, row, number, ends, MOST_ROWS: tl.constexpr):
    """Return the address of the words of another rank's row, which may not have arrived."""
    return _inbox(ends, ends.rank) + _place(number, rank, ends.rank, row, ends.size, MOST_ROWS) * PLACE_WORDS


@triton.jit
def await_row(rank, row, number, ends, MOST_ROWS: tl.constexpr):
    """Wait for the flag of another rank's row; return the address of its words."""
    flags: tl.constexpr = 2 * (ends.size - 1) * MOST_ROWS * PLACE_WORDS
    flag = _inbox(ends, ends.rank) + flags + _place(number, rank, ends.rank, row, ends.size, MOST_ROWS)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != number:
        pass
    return _row_from(rank, row, number, ends, MOST_ROWS)


@triton.jit
def received(words, at, inside):
    """Return the words `at` of a row that has arrived, 0 outside."""
    return tl.load(words + at, mask=inside, other=0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["num_rows"])
def _sum_norm_kernel(
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
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add the sums of the ranks' bfloat16 rows of WIDTH words to the residual, and store its norm.

    A program sends GROUP rows with one flag, that of the first, because a flag waits until its data have arrived. Its
    own words lie in the output until the others' have come."""
    at, program = tl.arange(0, COUNT), tl.program_id(0)
    inside = at < WIDTH
    weights = load_pairs(weight, at, inside)
    await_before(OVERLAP)
    number = tl.load(ends.numbers + program) + 1
    for first in range(program, num_rows, PROGRAMS * GROUP):
        behind = tl.minimum(first + PROGRAMS * GROUP, num_rows)
        for row in range(first, behind, PROGRAMS):
            words = own_words(own, row, at, inside)
            for rank in tl.static_range(ends.size):
                if rank != ends.rank:
                    send(rank, words, at, inside, row, number, ends, MOST_ROWS)
            tl.store(to[0] + row * WIDTH + at, words, mask=inside)
        send_flags(first, number, ends, MOST_ROWS)
        for rank in tl.static_range(ends.size):
            if rank != ends.rank:
                await_row(rank, first, number, ends, MOST_ROWS)
        for row in range(first, behind, PROGRAMS):
            index = row * WIDTH + at
            words = tl.load(to[0] + index, mask=inside, other=0)
            side_low, side_high = halves(tl.load(residual + index, mask=inside, other=0))
            low, high = tl.zeros((COUNT,), tl.float32), tl.zeros((COUNT,), tl.float32)
            for rank in tl.static_range(ends.size):  # in this order, so that all ranks get the same bits
                found = words
                if rank != ends.rank:
                    found = received(_row_from(rank, row, number, ends, MOST_ROWS), at, inside)
                more_low, more_high = halves(found)
                low += more_low
                high += more_high
            low, high = halves(joined(low, high))
            total = joined(low + side_low, high + side_high)
            tl.store(residual + index, total, mask=inside)
            store_norm(total, weights, to, row, at, inside, WIDTH, eps)
    end(number, ends)
    start_next(OVERLAP)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_kernel(
    own,
    out,
    ends,
    num_rows,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Concatenate the ranks' rows of WIDTH words. A program sends all its rows before it waits for others."""
    at, program = tl.arange(0, COUNT), tl.program_id(0)
    inside = at < WIDTH
    await_before(OVERLAP)
    number = tl.load(ends.numbers + program) + 1
    for row in range(program, num_rows, PROGRAMS):
        words = own_words(own, row, at, inside)
        for rank in tl.static_range(ends.size):
            if rank != ends.rank:
                send(rank, words, at, inside, row, number, ends, MOST_ROWS)
        send_flags(row, number, ends, MOST_ROWS)
        tl.store(out + (row * ends.size + ends.rank) * WIDTH + at, words, mask=inside)
    for row in range(program, num_rows, PROGRAMS):
        for rank in tl.static_range(ends.size):
            if rank != ends.rank:
                words = received(await_row(rank, row, number, ends, MOST_ROWS), at, inside)
                tl.store(out + (row * ends.size + rank) * WIDTH + at, words, mask=inside)
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
    return num_bytes % 4 == 0 and num_bytes <= MOST_ROW_BYTES


def sum_add_rmsnorm(own: Own, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes, out: Tensor) -> Tensor:
    """Add the all-reduced, rounded bfloat16 `x[T, D]` to the residual in place; write the norm of the residual to
    `out`."""
    assert residual.is_contiguous(), f"strides are {residual.stride()}"
    codes, scales, padded_rows = written_beside(out)
    for part in _parts(residual):
        given, side = own.part(part), residual[part].view(torch.int32)
        beside = (None if codes is None else codes[part], None if scales is None else scales[part], padded_rows)
        operands = (given, side, weight, (out[part].view(torch.int32), *beside), inboxes, len(side), eps)
        group = max(2, WORDS_AT_ONCE // side.shape[1])
        _sum_norm_kernel[(min(len(side), PROGRAMS),)](*operands, GROUP=group, **_sizes(side))
    return out


def gather(own: Own, out: Tensor, inboxes: Inboxes) -> Tensor:
    """Return bfloat16 `out[T, size * D]` with the ranks' concatenated rows `[T, D]`."""
    for part in _parts(out):
        to = out[part].view(torch.int32)
        sizes = _sizes(to, inboxes.size.value)
        _gather_kernel[(min(len(to), PROGRAMS),)](own.part(part), to, inboxes, len(to), **sizes)
    return out


def _parts(x: Tensor) -> list[slice]:
    """Split the rows into slices that one launch can exchange."""
    return [slice(first, first + MOST_ROWS) for first in range(0, len(x), MOST_ROWS)]


def _sizes(words: Tensor, ranks: int = 1) -> dict[str, Any]:
    num_rows, width = len(words), words.shape[1] // ranks
    sizes = {"WIDTH": width, "COUNT": next_power_of_2(width), "PROGRAMS": PROGRAMS, "MOST_ROWS": MOST_ROWS}
    return {**sizes, "num_warps": 8, **overlap(words.device, num_rows)}
