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
from forkpoint.ops.linear.fp8_kernel import Rounded, store_narrowed, written_beside
from forkpoint.ops.linear.scaled import BLOCK
from forkpoint.ops.unmade import Parts

WORD_BYTES = 4  # of data
WORDS = 2048  # of a program at most
PROGRAMS = 256  # at most, so that all of them are at work at once, whatever waits for whom
FEW_WORDS = 256  # at least
FEW_ROWS = 32  # of a norm, each of which has more threads then
PLACES, PLACE_WORDS = tl.constexpr(PROGRAMS), tl.constexpr(WORDS)
PIECE = tl.constexpr(BLOCK)  # elements of a row that have one scale in FP8


@triton.jit
def _send(own, inside, inboxes, numbers, RANK: tl.constexpr, SIZE: tl.constexpr):
    """`own` words of this program to all other ranks. (number of the exchange, this program's places in an inbox)

    A program has two places of each rank in each inbox, and takes turns: when another rank's program begins an
    exchange, it has read all that came in the one before.
    """
    program, at = tl.program_id(0), tl.arange(0, own.shape[0])
    number = tl.load(numbers + program) + 1
    word = (own.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    places = ((number & 1) * PLACES + program).to(tl.int64) * SIZE
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            inbox = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64))
            tl.store(inbox + (places + RANK) * PLACE_WORDS + at, word, mask=inside)
    return number, places


@triton.jit
def _receive(rank, inside, number, places, inboxes, RANK: tl.constexpr, COUNT: tl.constexpr):
    """The words of `rank`, once they have come."""
    tag = number.to(tl.int64) << 32
    come = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64)) + (places + rank) * PLACE_WORDS + tl.arange(0, COUNT)
    word = tl.load(come, mask=inside, other=tag, volatile=True)
    while tl.max(((word >> 32).to(tl.int32) != number).to(tl.int32), axis=0) > 0:
        word = tl.load(come, mask=inside, other=tag, volatile=True)
    return word.to(tl.int32)


@triton.jit
def _end(number, numbers):
    tl.debug_barrier()  # all threads have read the number
    tl.store(numbers + tl.program_id(0), number)


@triton.jit
def _halves(words):
    """Two bfloat16 of each word, as fp32."""
    return (words << 16).to(tl.float32, bitcast=True), (words >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def _joined(low, high):
    """The same back, rounded."""
    low_bits = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def own_words(x, shares, row, x_row, x_part, at, inside, PARTS: tl.constexpr):
    """The words `at` of a row of x; with PARTS those of the sum of so many, each times its share if there are any,
    rounded as it would be, were it stored."""
    x += row * x_row
    if PARTS == 0:
        words = tl.load(x + at, mask=inside, other=0)
    else:
        low, high = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
        for part in tl.static_range(PARTS):  # no loop, so that all loads are under way together
            if x.dtype.element_ty == tl.float32:
                more_low = tl.load(x + part * x_part + 2 * at, mask=inside, other=0.0)
                more_high = tl.load(x + part * x_part + 2 * at + 1, mask=inside, other=0.0)
            else:
                more_low, more_high = _halves(tl.load(x + part * x_part + at, mask=inside, other=0))
            share = 1.0 if shares is None else tl.load(shares + row * PARTS + part)
            low += share * more_low
            high += share * more_high
        words = _joined(low, high)
    return words


@triton.jit
def store_norm(
    total, weight_low, weight_high, out, codes, scales, padded_rows, row, at, inside, width, eps, ROUNDS: tl.constexpr
):
    """The norm of a row of `width` words, and with ROUNDS the same in FP8."""
    low, high = _halves(total)
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / (2 * width) + eps)
    normed = _joined(low * scale * weight_low, high * scale * weight_high)
    tl.store(out + row * width + at, normed, mask=inside)
    if ROUNDS:
        low, high = _halves(normed)
        value = tl.reshape(tl.join(low, high), (2 * at.shape[0] // PIECE, PIECE))
        pieces = tl.arange(0, 2 * at.shape[0] // PIECE)
        rows = tl.zeros(pieces.shape, tl.int32) + row
        store_narrowed(value, codes, scales, rows, pieces, pieces < 2 * width // PIECE, 2 * width, padded_rows)


@triton.jit
def _summed(own, inside, number, places, inboxes, RANK: tl.constexpr, SIZE: tl.constexpr):
    """In the order of the ranks, so that all have the same bits."""
    low, high = tl.zeros(own.shape, tl.float32), tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        found = own
        if rank != RANK:
            found = _receive(rank, inside, number, places, inboxes, RANK, own.shape[0])
        more_low, more_high = _halves(found)
        low += more_low
        high += more_high
    return _joined(low, high)


@triton.jit(do_not_specialize=["num_words", "width"])
def _exchange_kernel(
    x,
    out,
    inboxes,
    numbers,
    num_words,
    width,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    SUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """COUNT words of `x`, for one program; `inboxes` are the ranks' addresses. With SUM words are two bfloat16, and
    `out` their sums; else rows of `width` words are put side by side."""
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = index < num_words
    await_before(OVERLAP)
    own = tl.load(x + index, mask=inside, other=0)
    number, places = _send(own, inside, inboxes, numbers, RANK, SIZE)
    if SUM:
        total = _summed(own, inside, number, places, inboxes, RANK, SIZE)
        tl.store(out + index, total, mask=inside)
    else:
        row = (index // width).to(tl.int64)
        for rank in tl.static_range(SIZE):
            found = own
            if rank != RANK:
                found = _receive(rank, inside, number, places, inboxes, RANK, COUNT)
            tl.store(out + (row * SIZE + rank) * width + index % width, found, mask=inside)
    _end(number, numbers)
    start_next(OVERLAP)


@triton.jit
def _sum_norm_kernel(
    x,
    shares,
    x_row,
    x_part,
    residual,
    weight,
    out,
    codes,
    scales,
    padded_rows,
    inboxes,
    numbers,
    width,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A row of `width` words, of two bfloat16, for one program: `residual` plus the sum over ranks, and its norm. All
    but `x` is older than the launch before."""
    at, row = tl.arange(0, COUNT), tl.program_id(0).to(tl.int64)
    inside, index = at < width, row * width + at
    side_low, side_high = _halves(tl.load(residual + index, mask=inside, other=0))
    weight_low = tl.load(weight + 2 * at, mask=inside, other=0.0)
    weight_high = tl.load(weight + 2 * at + 1, mask=inside, other=0.0)
    await_before(OVERLAP)
    own = own_words(x, shares, row, x_row, x_part, at, inside, PARTS)
    number, places = _send(own, inside, inboxes, numbers, RANK, SIZE)
    low, high = _halves(_summed(own, inside, number, places, inboxes, RANK, SIZE))
    total = _joined(low + side_low, high + side_high)
    tl.store(residual + index, total, mask=inside)
    store_norm(
        total, weight_low, weight_high, out, codes, scales, padded_rows, row, at, inside, width, eps, ROUNDS
    )  # fmt: skip
    _end(number, numbers)
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


class Inboxes(NamedTuple):
    """What one rank's end of exchanges is given; all of it starts as zeros."""

    addresses: Tensor  # [size] int64: where the ranks have their inboxes
    numbers: Tensor  # [PROGRAMS] int32: the exchanges that each program has been in
    rank: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"RANK": self.rank, "SIZE": len(self.addresses)}


def exchange(x: Tensor, out: Tensor, inboxes: Inboxes, sums: bool) -> Tensor:
    """Write to `out` the sum over ranks of `x`, in bfloat16, or their rows side by side."""
    words = x.contiguous().view(torch.int32)
    num_words = words.numel()
    if num_words:
        count = words_each(num_words)
        operands = (words, out.view(torch.int32), inboxes.addresses, inboxes.numbers, num_words, words.shape[-1])
        options = {"num_warps": 4 if count <= 512 else 8, **overlap(x.device, x.shape[0])}
        grid = (triton.cdiv(num_words, count),)
        _exchange_kernel[grid](*operands, **inboxes.sizes, COUNT=count, SUM=sums, **options)
    return out


class Own(NamedTuple):
    """What kernels are given of rows that a rank brings to a sum: words of two bfloat16, or parts of them, which may be
    in fp32; `shares`, their strides of a row and of a part, and how many there are, 0 of plain rows."""

    rows: Tensor
    shares: Tensor | None
    row_stride: int
    part_stride: int
    num_parts: int

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """`x[M, D]`, or `Parts` of it."""
        if not isinstance(x, Parts):
            words = x.contiguous().view(torch.int32)
            return cls(words, None, words.shape[1], 0, 0)
        own = x.own if x.own.dtype == torch.float32 else x.own.view(torch.int32)
        return cls(own, x.shares, own.stride(0), own.stride(1), own.shape[1])

    def part(self, rows: slice) -> Self:
        """Some of the rows."""
        return self._replace(rows=self.rows[rows], shares=None if self.shares is None else self.shares[rows])


def sum_add_rmsnorm(own: Own, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes, out: Tensor) -> Tensor:
    """`out`, the norm of `residual + x`, with x[T, D] summed over ranks and rounded, after `residual += x` in place; at
    most PROGRAMS rows, of at most WORDS words of two elements."""
    assert residual.is_contiguous(), f"strides are {residual.stride()}"
    num_rows, width = len(residual), residual.shape[1] // 2
    if num_rows:
        side, to = residual.view(torch.int32), out.view(torch.int32)
        operands = (*own[:4], side, weight, to, *written_beside(out), inboxes.addresses, inboxes.numbers)
        sizes = {"COUNT": triton.next_power_of_2(width), "PARTS": own.num_parts, "ROUNDS": isinstance(out, Rounded)}
        options = {"num_warps": 16 if num_rows <= FEW_ROWS else 8, **overlap(residual.device, num_rows)}
        _sum_norm_kernel[(num_rows,)](*operands, width, eps, **inboxes.sizes, **sizes, **options)
    return out
