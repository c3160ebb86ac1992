"""Small exchanges between ranks whose devices reach each other's memory: one kernel each, also in a graph.

A rank writes what it has into an inbox of each other rank, as words of 8 bytes: 4 of data and, in the upper half, the
number of the exchange. It waits until its own inbox has that number everywhere, so data need no flag behind them.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_before, overlap, start_next
from forkpoint.ops.linear.fp8_kernel import store_narrowed, written_beside
from forkpoint.ops.linear.scaled import BLOCK
from forkpoint.ops.unmade import Parts

WORD_BYTES = 4  # of data
WORDS = 2048  # of a program at most
PROGRAMS = 256  # at most, so that all of them are at work at once, whatever waits for whom
FEW_WORDS = 256  # at least
FEW_ROWS = 32  # of a norm, each of which has more threads then
PLACES, PLACE_WORDS = tl.constexpr(PROGRAMS), tl.constexpr(WORDS)
PIECE = tl.constexpr(BLOCK)  # elements of a row that have one scale in FP8


class Inboxes(NamedTuple):
    """One rank's end of exchanges, as kernels are given it; all of it starts as zeros."""

    addresses: Tensor  # [size] int64: where the ranks have their inboxes
    numbers: Tensor  # int32, of each program: the exchanges that it has been in
    rank: tl.constexpr
    size: tl.constexpr

    @classmethod
    def of(cls, rank: int, addresses: Tensor, programs: int) -> Self:
        numbers = torch.zeros(programs, dtype=torch.int32, device=addresses.device)
        return cls(addresses, numbers, tl.constexpr(rank), tl.constexpr(len(addresses)))


class Own(NamedTuple):
    """What kernels are given of rows that a rank brings to a sum: words of two bfloat16, or parts of them, which may be
    in fp32; `shares`, their strides of a row and of a part, and how many there are, 0 of plain rows."""

    rows: Tensor
    shares: Tensor | None
    row_stride: int
    part_stride: int
    num_parts: tl.constexpr

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """`x[M, D]`, or `Parts` of it."""
        if not isinstance(x, Parts):
            words = x.contiguous().view(torch.int32)
            return cls(words, None, words.shape[1], 0, tl.constexpr(0))
        own = x.own if x.own.dtype == torch.float32 else x.own.view(torch.int32)
        return cls(own, x.shares, own.stride(0), own.stride(1), tl.constexpr(own.shape[1]))

    def part(self, rows: slice) -> Self:
        """Some of the rows."""
        return self._replace(rows=self.rows[rows], shares=None if self.shares is None else self.shares[rows])


@triton.jit
def _send(own, inside, ends):
    """`own` words of this program to all other ranks. (number of the exchange, this program's places in an inbox)

    A program has two places of each rank in each inbox, and takes turns: when another rank's program begins an
    exchange, it has read all that came in the one before.
    """
    program, at = tl.program_id(0), tl.arange(0, own.shape[0])
    number = tl.load(ends.numbers + program) + 1
    word = (own.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    places = ((number & 1) * PLACES + program).to(tl.int64) * ends.size
    for rank in tl.static_range(ends.size):
        if rank != ends.rank:
            inbox = tl.load(ends.addresses + rank).to(tl.pointer_type(tl.int64))
            tl.store(inbox + (places + ends.rank) * PLACE_WORDS + at, word, mask=inside)
    return number, places


@triton.jit
def _receive(rank, inside, number, places, ends):
    """The words of `rank`, once they have come."""
    tag, at = number.to(tl.int64) << 32, tl.arange(0, inside.shape[0])
    come = tl.load(ends.addresses + ends.rank).to(tl.pointer_type(tl.int64)) + (places + rank) * PLACE_WORDS + at
    word = tl.load(come, mask=inside, other=tag, volatile=True)
    while tl.max(((word >> 32).to(tl.int32) != number).to(tl.int32), axis=0) > 0:
        word = tl.load(come, mask=inside, other=tag, volatile=True)
    return word.to(tl.int32)


@triton.jit
def end(number, ends):
    tl.debug_barrier()  # all threads have read the number
    tl.store(ends.numbers + tl.program_id(0), number)


@triton.jit
def halves(words):
    """Two bfloat16 of each word, as fp32."""
    return (words << 16).to(tl.float32, bitcast=True), (words >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def joined(low, high):
    """The same back, rounded."""
    low_bits = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def load_pairs(x, at, inside):
    """Two fp32 where `halves` would find two bfloat16."""
    return tl.load(x + 2 * at, mask=inside, other=0.0), tl.load(x + 2 * at + 1, mask=inside, other=0.0)


@triton.jit
def own_words(own, row, at, inside):
    """The words `at` of a row; those of a sum of parts, each times its share if there are any, rounded as it would be,
    were it stored."""
    x = own.rows + row * own.row_stride
    if own.num_parts == 0:
        words = tl.load(x + at, mask=inside, other=0)
    else:
        low, high = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
        for part in tl.static_range(own.num_parts):  # no loop, so that all loads are under way together
            if x.dtype.element_ty == tl.float32:
                more_low, more_high = load_pairs(x + part * own.part_stride, at, inside)
            else:
                more_low, more_high = halves(tl.load(x + part * own.part_stride + at, mask=inside, other=0))
            share = 1.0 if own.shares is None else tl.load(own.shares + row * own.num_parts + part)
            low += share * more_low
            high += share * more_high
        words = joined(low, high)
    return words


@triton.jit
def store_norm(total, weights, to, row, at, inside, width, eps):
    """The norm of a row of `width` words, and the same in FP8 if `to` has room for it."""
    out, codes, scales, padded_rows = to
    low, high = halves(total)
    weight_low, weight_high = weights
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / (2 * width) + eps)
    normed = joined(low * scale * weight_low, high * scale * weight_high)
    tl.store(out + row * width + at, normed, mask=inside)
    if codes is not None:
        low, high = halves(normed)
        value = tl.reshape(tl.join(low, high), (2 * at.shape[0] // PIECE, PIECE))
        pieces = tl.arange(0, 2 * at.shape[0] // PIECE)
        rows = tl.zeros(pieces.shape, tl.int32) + row
        store_narrowed(value, codes, scales, rows, pieces, pieces < 2 * width // PIECE, 2 * width, padded_rows)


@triton.jit
def _summed(own, inside, number, places, ends):
    """In the order of the ranks, so that all have the same bits."""
    low, high = tl.zeros(own.shape, tl.float32), tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(ends.size):
        found = own
        if rank != ends.rank:
            found = _receive(rank, inside, number, places, ends)
        more_low, more_high = halves(found)
        low += more_low
        high += more_high
    return joined(low, high)


@triton.jit(do_not_specialize=["num_words", "width"])
def _exchange_kernel(x, out, ends, num_words, width, COUNT: tl.constexpr, SUM: tl.constexpr, OVERLAP: tl.constexpr):
    """COUNT words of `x`, for one program. With SUM words are two bfloat16, and `out` their sums; else rows of `width`
    words are put side by side."""
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = index < num_words
    await_before(OVERLAP)
    own = tl.load(x + index, mask=inside, other=0)
    number, places = _send(own, inside, ends)
    if SUM:
        total = _summed(own, inside, number, places, ends)
        tl.store(out + index, total, mask=inside)
    else:
        row = (index // width).to(tl.int64)
        for rank in tl.static_range(ends.size):
            found = own
            if rank != ends.rank:
                found = _receive(rank, inside, number, places, ends)
            tl.store(out + (row * ends.size + rank) * width + index % width, found, mask=inside)
    end(number, ends)
    start_next(OVERLAP)


@triton.jit
def _sum_norm_kernel(own, residual, weight, to, ends, width, eps, COUNT: tl.constexpr, OVERLAP: tl.constexpr):
    """A row of `width` words, of two bfloat16, for one program: `residual` plus the sum over ranks, and its norm. All
    but `own` is older than the launch before."""
    at, row = tl.arange(0, COUNT), tl.program_id(0).to(tl.int64)
    inside, index = at < width, row * width + at
    side_low, side_high = halves(tl.load(residual + index, mask=inside, other=0))
    weights = load_pairs(weight, at, inside)
    await_before(OVERLAP)
    words = own_words(own, row, at, inside)
    number, places = _send(words, inside, ends)
    low, high = halves(_summed(words, inside, number, places, ends))
    total = joined(low + side_low, high + side_high)
    tl.store(residual + index, total, mask=inside)
    store_norm(total, weights, to, row, at, inside, width, eps)
    end(number, ends)
    start_next(OVERLAP)


def inbox_words(size: int) -> int:
    """Of one of `size` ranks, as int64."""
    return 2 * PROGRAMS * size * WORDS


def takes(x: Tensor) -> bool:
    """Whether an exchange has room for `x`."""
    row = x.shape[-1] * x.element_size()
    return row % WORD_BYTES == 0 and x.numel() * x.element_size() <= PROGRAMS * WORDS * WORD_BYTES


def words_each(num_words: int) -> int:
    """Of a program."""
    count: int = triton.next_power_of_2(triton.cdiv(num_words, PROGRAMS))
    return max(FEW_WORDS, count)


def exchange(x: Tensor, out: Tensor, inboxes: Inboxes, sums: bool) -> Tensor:
    """Write to `out` the sum over ranks of `x`, in bfloat16, or their rows side by side."""
    words = x.contiguous().view(torch.int32)
    num_words = words.numel()
    if num_words:
        count = words_each(num_words)
        operands = (words, out.view(torch.int32), inboxes, num_words, words.shape[-1])
        options = {"num_warps": 4 if count <= 512 else 8, **overlap(x.device, x.shape[0])}
        _exchange_kernel[(triton.cdiv(num_words, count),)](*operands, COUNT=count, SUM=sums, **options)
    return out


def sum_add_rmsnorm(own: Own, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes, out: Tensor) -> Tensor:
    """`out`, the norm of `residual + x`, with x[T, D] summed over ranks and rounded, after `residual += x` in place; at
    most PROGRAMS rows, of at most WORDS words of two elements."""
    assert residual.is_contiguous(), f"strides are {residual.stride()}"
    num_rows, width = len(residual), residual.shape[1] // 2
    if num_rows:
        to = (out.view(torch.int32), *written_beside(out))
        options = {"num_warps": 16 if num_rows <= FEW_ROWS else 8, **overlap(residual.device, num_rows)}
        options |= {"COUNT": triton.next_power_of_2(width)}
        _sum_norm_kernel[(num_rows,)](own, residual.view(torch.int32), weight, to, inboxes, width, eps, **options)
    return out
