"""Merging of partial attention between devices that can write to each other's memory, in one kernel.

Each rank has attended with the queries of all ranks to the keys that it keeps. It writes the results of another rank's
heads into an inbox there (rows_kernel.py), and merges what it receives for its own heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.exchange import rows_kernel as rows
from forkpoint.ops.exchange.kernel import Inboxes, end
from forkpoint.ops.exchange.rows_kernel import await_row, received, send, send_flags
from forkpoint.ops.launch import await_before, overlap, start_next
from forkpoint.ops.rounding import next_power_of_2

LEAST = tl.constexpr(-3.0e38)  # less than the logarithm of any sum


@triton.jit
def _head(parts, row, rank, at, inside, ends, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Return what this rank has found for a head of `rank`: its numbers, and the logarithm of its sum."""
    head = parts + (((row // GROUP) * ends.size + rank) * GROUP + row % GROUP) * (WIDTH + 1)
    return tl.load(head + at, mask=inside, other=0.0), tl.load(head + WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    parts,
    out,
    ends,
    num_rows,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge heads of `parts[num_rows / GROUP, ranks, GROUP, WIDTH + 1]`, fp32, into `out[num_rows, WIDTH]`.

    A head's numbers are followed by the logarithm of its sum of exponentials. A program sends all its heads before it
    waits for others."""
    at, program = tl.arange(0, COUNT), tl.program_id(0)
    inside = at < WIDTH
    await_before(OVERLAP)
    number = tl.load(ends.numbers + program) + 1
    for row in range(program, num_rows, PROGRAMS):
        for rank in tl.static_range(ends.size):
            if rank != ends.rank:
                head, log_sum = _head(parts, row, rank, at, inside, ends, GROUP, WIDTH)
                send(rank, head.to(tl.int32, bitcast=True), at, inside, row, number, ends, MOST_ROWS)
                send(rank, log_sum.to(tl.int32, bitcast=True), WIDTH, True, row, number, ends, MOST_ROWS)
        send_flags(row, number, ends, MOST_ROWS)
    for row in range(program, num_rows, PROGRAMS):
        merged, total, most = tl.zeros((COUNT,), tl.float32), 0.0, tl.full((), LEAST, tl.float32)
        for rank in tl.static_range(ends.size):
            if rank == ends.rank:
                head, log_sum = _head(parts, row, rank, at, inside, ends, GROUP, WIDTH)
            else:
                words = await_row(rank, row, number, ends, MOST_ROWS)
                head = received(words, at, inside).to(tl.float32, bitcast=True)
                log_sum = received(words, WIDTH, True).to(tl.float32, bitcast=True)
            most_now = tl.maximum(most, log_sum)
            kept, share = tl.exp(most - most_now), tl.exp(log_sum - most_now)
            merged, total, most = merged * kept + head * share, total * kept + share, most_now
        tl.store(out + row * WIDTH + at, merged / total, mask=inside)
    end(number, ends)
    start_next(OVERLAP)


def takes(parts: Tensor) -> bool:
    """Return whether `merge` supports such parts."""
    return parts.dtype == torch.float32 and rows.takes_row(4 * parts.shape[3])


def merge(parts: Tensor, out: Tensor, inboxes: Inboxes) -> Tensor:
    """Send `parts[:, r]` to rank r and merge what arrives: `parts[N, ranks, G, D + 1]`, `out[N, G, D]`."""
    count, _, group, width = parts.shape
    at_a_time = rows.MOST_ROWS // group
    sizes = {"GROUP": group, "WIDTH": width - 1, "COUNT": next_power_of_2(width - 1), "PROGRAMS": rows.PROGRAMS}
    # all programs of a launch fit on the device at once, however many rows they have
    options = {"MOST_ROWS": rows.MOST_ROWS, "num_warps": 4, **overlap(parts.device, 1)}
    for first in range(0, count, at_a_time):
        own, to = parts[first : first + at_a_time], out[first : first + at_a_time]
        num_rows = len(own) * group
        _merge_kernel[(min(num_rows, rows.PROGRAMS),)](own, to, inboxes, num_rows, **sizes, **options)
    return out
