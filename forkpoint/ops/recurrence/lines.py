"""Ring buffers of records ("lines") for the kernels of rows whose states are written every few tokens.

A record lies at its position modulo the line's length, so the oldest record may lie anywhere in the line. In the
STRAIGHT form, for devices that drop the masks of gathered loads, a line is read as two contiguous pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Values per token and head in front of its scores: decay times key scale, beta, key times query, decay times query
# scale.
GATES = tl.constexpr(4)


@triton.jit
def extent(row, written, held, INTERVAL: tl.constexpr):
    """Return, for a row: (tokens in the state of its slot, records to fold, records that stay)."""
    own, count = tl.load(written + row), tl.load(held + row)
    folded = tl.maximum((own + count) // INTERVAL * INTERVAL - own, 0)
    return own, folded, count - folded


@triton.jit
def places(begin, past, LENGTH: tl.constexpr, STRAIGHT: tl.constexpr):
    """Return the places of tokens `begin + past` in their line. In the STRAIGHT form, places that wrap around continue
    past the line's end."""
    return begin % LENGTH + past if STRAIGHT else (begin + past) % LENGTH


@triton.jit
def end_of_line(begin, low, high, LENGTH: tl.constexpr):
    """Return the first of the tokens `[low, high)` after `begin` that wraps around to the line's start, or `high`."""
    return tl.minimum(tl.maximum(LENGTH - begin % LENGTH, low), high)


@triton.jit
def read_line(entries, present, past, end, LENGTH: tl.constexpr, SIZE: tl.constexpr, STRAIGHT: tl.constexpr):
    """Load the `present` entries of a line of LENGTH entries of SIZE values, in the shape of `entries`.

    Entries from `end` on wrap around. `present` is a contiguous range, and `end` lies within it, because the compiler
    for NPUs gives a range whose end is before its start a negative length.
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
    """Store `values` to the entries that `read_line` would load."""
    if STRAIGHT:
        tl.store(entries, values, mask=present & (past < end))
        tl.store(entries - LENGTH * SIZE, values, mask=present & (past >= end))
    else:
        tl.store(entries, values, mask=present)
