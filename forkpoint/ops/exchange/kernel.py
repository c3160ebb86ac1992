"""Small exchanges between ranks whose devices reach each other's memory: one kernel each, also in a graph.

A rank writes what it has into an inbox of each other rank, as words of 8 bytes: 4 of data and, in the upper half, the
number of the exchange. It waits until its own inbox has that number everywhere, so data need no flag behind them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_before, overlap, start_next

WORD_BYTES = 4  # of data
WORDS = 2048  # of a program at most
PROGRAMS = 256  # at most, so that all of them are at work at once, whatever waits for whom
FEW_WORDS = 512  # of a program while that makes few programs
FEW_PROGRAMS = 32


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
    PLACES: tl.constexpr,
    PLACE_WORDS: tl.constexpr,
    SUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """COUNT words of `x`, for one program; `inboxes` are the ranks' addresses. With SUM words are two bfloat16, and
    `out` their sums; else rows of `width` words are put side by side.

    A program has two places of each rank in each inbox, and takes turns: when another rank's program begins an
    exchange, it has read all that came in the one before.
    """
    program, at = tl.program_id(0), tl.arange(0, COUNT)
    index = program * COUNT + at
    inside = index < num_words
    await_before(OVERLAP)
    number = tl.load(numbers + program) + 1
    own = tl.load(x + index, mask=inside, other=0)
    tag = number.to(tl.int64) << 32
    word = (own.to(tl.int64) & 0xFFFFFFFF) | tag
    turn = ((number & 1) * PLACES + program).to(tl.int64) * SIZE
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            inbox = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64))
            tl.store(inbox + (turn + RANK) * PLACE_WORDS + at, word, mask=inside)
    mine = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64))
    low, high = tl.zeros((COUNT,), tl.float32), tl.zeros((COUNT,), tl.float32)
    for rank in tl.static_range(SIZE):
        found = own
        if rank != RANK:
            come = mine + (turn + rank) * PLACE_WORDS + at
            word = tl.load(come, mask=inside, other=tag, volatile=True)
            while tl.max(((word >> 32).to(tl.int32) != number).to(tl.int32), axis=0) > 0:
                word = tl.load(come, mask=inside, other=tag, volatile=True)
            found = word.to(tl.int32)
        if SUM:
            low += (found << 16).to(tl.float32, bitcast=True)
            high += (found >> 16 << 16).to(tl.float32, bitcast=True)
        else:
            row = (index // width).to(tl.int64)
            tl.store(out + (row * SIZE + rank) * width + index % width, found, mask=inside)
    if SUM:
        low_bits = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high_bits = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(out + index, low_bits | high_bits, mask=inside)
    tl.debug_barrier()  # all threads have read the number
    tl.store(numbers + program, number)
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
    return FEW_WORDS if num_words <= FEW_WORDS * FEW_PROGRAMS else WORDS


def exchange(x: Tensor, out: Tensor, inboxes: Tensor, numbers: Tensor, rank: int, sums: bool) -> Tensor:
    """Write to `out` the sum over ranks of `x`, in bfloat16, or their rows side by side. `inboxes[size]` int64 are the
    addresses of the inboxes, `numbers[PROGRAMS]` int32 what this rank's programs have counted; all start as zeros."""
    words = x.contiguous().view(torch.int32)
    num_words = words.numel()
    if num_words:
        count = words_each(num_words)
        _exchange_kernel[(triton.cdiv(num_words, count),)](
            words,
            out.view(torch.int32),
            inboxes,
            numbers,
            num_words,
            words.shape[-1],
            RANK=rank,
            SIZE=len(inboxes),
            COUNT=count,
            PLACES=PROGRAMS,
            PLACE_WORDS=WORDS,
            SUM=sums,
            num_warps=4 if count <= 512 else 8,
            **overlap(x.device, x.shape[0]),
        )
    return out
