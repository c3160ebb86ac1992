"""What the kernels of recorded rows share: lines of records, of which the oldest may be anywhere."""

from __future__ import annotations

import triton
import triton.language as tl

GATES = tl.constexpr(4)  # of a token: what a key finds in the state grows by, beta, key by query, what a query finds


@triton.jit
def extent(row, written, held, INTERVAL: tl.constexpr):
    """Of a row: tokens of the state in its slot, records to be folded, those that stay."""
    own, count = tl.load(written + row), tl.load(held + row)
    folded = tl.maximum((own + count) // INTERVAL * INTERVAL - own, 0)
    return own, folded, count - folded


@triton.jit
def places(begin, past, LENGTH: tl.constexpr, STRAIGHT: tl.constexpr):
    """Where in its line the tokens from `begin` on are; in the straight form those that begin the line anew are counted
    on behind its end."""
    return begin % LENGTH + past if STRAIGHT else (begin + past) % LENGTH


@triton.jit
def end_of_line(begin, low, high, LENGTH: tl.constexpr):
    """Which of the tokens `[low, high)` after `begin` begins the line anew; `high` if none does."""
    return tl.minimum(tl.maximum(LENGTH - begin % LENGTH, low), high)


@triton.jit
def read_line(entries, present, past, end, LENGTH: tl.constexpr, SIZE: tl.constexpr, STRAIGHT: tl.constexpr):
    """Of a line of LENGTH entries of SIZE those `present`, in the shape of `entries`; from `end` on they begin it anew.

    `present` are those between two numbers, and `end` is neither below nor above: to the compiler for NPUs a range
    whose end lies before its beginning has a negative length.
    """
    if STRAIGHT:
        near = tl.load(entries, mask=present & (past < end), other=0.0)
        anew = tl.load(entries - LENGTH * SIZE, mask=present & (past >= end), other=0.0)
        found = tl.where(past < end, near, anew)
    else:
        found = tl.load(entries, mask=present, other=0.0)
    return found


@triton.jit
def write_line(entries, values, present, past, end, LENGTH: tl.constexpr, SIZE: tl.constexpr, STRAIGHT: tl.constexpr):
    """As `read_line`."""
    if STRAIGHT:
        tl.store(entries, values, mask=present & (past < end))
        tl.store(entries - LENGTH * SIZE, values, mask=present & (past >= end))
    else:
        tl.store(entries, values, mask=present)
