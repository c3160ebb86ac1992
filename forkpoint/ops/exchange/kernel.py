"""Small all-reduces and all-gathers between devices that can write to each other's memory, one kernel each.

A rank writes its data into an inbox on each other rank, in words of 8 bytes: 4 bytes of data and, in the upper half,
the number of the exchange. A rank waits until every word of its own inbox has that number, so no separate flag is
needed. The kernels also run in CUDA graphs.
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
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.ops.unmade import Parts

WORD_BYTES = 4  # bytes of data per word
WORDS = 2048  # words per program at most
PROGRAMS = 256  # programs at most, so that all of them run at once and none waits for one that has not started
FEW_WORDS = 256  # words per program at least
FEW_ROWS = 32  # rows of a norm; up to here each row gets more threads
PLACES, PLACE_WORDS = tl.constexpr(PROGRAMS), tl.constexpr(WORDS)
PIECE = tl.constexpr(BLOCK)  # elements that share an FP8 scale


class Inboxes(NamedTuple):
    """One rank's arguments for exchange kernels. All memory starts as zeros."""

    addresses: Tensor  # [size] int64: addresses of the ranks' inboxes
    numbers: Tensor  # int32 per program: the number of exchanges it has taken part in
    rank: tl.constexpr
    size: tl.constexpr

    @classmethod
    def of(cls, rank: int, addresses: Tensor, programs: int) -> Self:
        numbers = torch.zeros(programs, dtype=torch.int32, device=addresses.device)
        return cls(addresses, numbers, tl.constexpr(rank), tl.constexpr(len(addresses)))


class Own(NamedTuple):
    """One rank's summand as kernel arguments: rows of words (two bfloat16 each), or `Parts` of rows, which may be fp32.

    `shares` multiply the parts. `num_parts` is 0 for plain rows."""

    rows: Tensor
    shares: Tensor | None
    row_stride: int
    part_stride: int
    num_parts: tl.constexpr

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Describe `x[M, D]`, which may be `Parts`."""
        if not isinstance(x, Parts):
            words = x.contiguous().view(torch.int32)
            return cls(words, None, words.shape[1], 0, tl.constexpr(0))
        own = x.own if x.own.dtype == torch.float32 else x.own.view(torch.int32)
        return cls(own, x.shares, own.stride(0), own.stride(1), tl.constexpr(own.shape[1]))

    def part(self, rows: slice) -> Self:
        """Return the description of some of the rows."""
        return self._replace(rows=self.rows[rows], shares=None if self.shares is None else self.shares[rows])


@triton.jit
def _send(own, inside, ends):
    """Send this program's words to all other ranks; return (number of the exchange, its places in an inbox).

    A program has two places per rank in each inbox and alternates between them. When another rank's program starts an
    exchange, it has read everything of the previous one.
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
    """Wait for the words of `rank` and return them."""
    tag, at = number.to(tl.int64) << 32, tl.arange(0, inside.shape[0])
    come = tl.load(ends.addresses + ends.rank).to(tl.pointer_type(tl.int64)) + (places + rank) * PLACE_WORDS + at
    word = tl.load(come, mask=inside, other=tag, volatile=True)
    while tl.max(((word >> 32).to(tl.int32) != number).to(tl.int32), axis=0) > 0:
        word = tl.load(come, mask=inside, other=tag, volatile=True)
    return word.to(tl.int32)


@triton.jit
def end(number, ends):
    tl.debug_barrier()  # wait until all threads have read the number
    tl.store(ends.numbers + tl.program_id(0), number)


@triton.jit
def halves(words):
    """Split each word into its two bfloat16 numbers, as fp32."""
    return (words << 16).to(tl.float32, bitcast=True), (words >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def joined(low, high):
    """Round two fp32 numbers to bfloat16 and join them to a word."""
    low_bits = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def load_pairs(x, at, inside):
    """Load two fp32 numbers in place of each word."""
    return tl.load(x + 2 * at, mask=inside, other=0.0), tl.load(x + 2 * at + 1, mask=inside, other=0.0)


@triton.jit
def own_words(own, row, at, inside):
    """Return the words `at` of a row. Parts are multiplied by their shares and added, then rounded as if stored."""
    x = own.rows + row * own.row_stride
    if own.num_parts == 0:
        words = tl.load(x + at, mask=inside, other=0)
    else:
        low, high = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
        for part in tl.static_range(own.num_parts):  # unrolled, so that all loads are in flight together
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
    """Store the norm of a row of `width` words, and its FP8 form if `to` has room for it."""
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
    """Return the sum over the ranks, added in their order so that all ranks get the same bits."""
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
    """Send the `num_words` words of `x` to all other ranks, wait for theirs, and store the combination in `out`.

    A word is 4 bytes. Each program exchanges COUNT words, and counts the exchange in `ends.numbers`. All ranks must
    launch the kernel, or it waits forever. With SUM, `out` has the sums of the bfloat16 numbers, added in fp32 in the
    order of the ranks. Otherwise its rows are the ranks' rows of `width` words, side by side.
    """
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
    """Store `residual` plus the sum over the ranks, and its norm, for one row of `width` words.

    The previous launch writes only `own`."""
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
    """Return the size of one rank's inbox, in int64 words, with `size` ranks."""
    return 2 * PROGRAMS * size * WORDS


def takes(x: Tensor) -> bool:
    """Return whether an exchange has room for `x`."""
    row = x.shape[-1] * x.element_size()
    return row % WORD_BYTES == 0 and x.numel() * x.element_size() <= PROGRAMS * WORDS * WORD_BYTES


def words_each(num_words: int) -> int:
    """Return the number of words per program."""
    count: int = next_power_of_2(ceil_div(num_words, PROGRAMS))
    return max(FEW_WORDS, count)


def exchange(x: Tensor, out: Tensor, inboxes: Inboxes, sums: bool) -> Tensor:
    """Return `out` with the sum of the ranks' bfloat16 `x`, or with `sums` false their concatenated rows."""
    words = x.contiguous().view(torch.int32)
    num_words = words.numel()
    if num_words:
        count = words_each(num_words)
        operands = (words, out.view(torch.int32), inboxes, num_words, words.shape[-1])
        options = {"num_warps": 4 if count <= 512 else 8, **overlap(x.device, x.shape[0])}
        _exchange_kernel[(ceil_div(num_words, count),)](*operands, COUNT=count, SUM=sums, **options)
    return out


def sum_add_rmsnorm(own: Own, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes, out: Tensor) -> Tensor:
    """Add the all-reduced, rounded `x[T, D]` to the residual in place, and write the norm of the residual to `out`.

    Supports at most PROGRAMS rows of at most WORDS words."""
    assert residual.is_contiguous(), f"strides are {residual.stride()}"
    num_rows, width = len(residual), residual.shape[1] // 2
    if num_rows:
        to = (out.view(torch.int32), *written_beside(out))
        options = {"num_warps": 16 if num_rows <= FEW_ROWS else 8, **overlap(residual.device, num_rows)}
        options |= {"COUNT": next_power_of_2(width)}
        _sum_norm_kernel[(num_rows,)](own, residual.view(torch.int32), weight, to, inboxes, width, eps, **options)
    return out
