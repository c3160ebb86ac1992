"""The results of decode rows over some of their keys in Triton, which other ranks' results are merged with."""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.attention.softmax import join_sums
from forkpoint.ops.launch import await_inputs

NO_KEYS = tl.constexpr(-1.0e30)  # as in the reference: the logarithm of the sum of exponentials of no keys
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def partial_kernel(
    acc_ptr,
    l_ptr,
    m_ptr,
    out,
    part_ptr,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the parts of one query head of one row: its output, then the logarithm of its sum of exponentials."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    begin, end = tl.load(part_ptr + row), tl.load(part_ptr + row + 1)
    await_inputs(OVERLAP)
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(DV) if DV > 16 else 16
    at, entry = tl.arange(0, BLOCK_DV), begin.to(tl.int64) * HEADS + head
    acc, l_i, m_i = join_sums(acc_ptr, l_ptr, m_ptr, entry, end - begin, HEADS, at, DV)
    total = tl.where(l_i > 0, l_i, 1.0)
    place = out + row.to(tl.int64) * out_token + head * out_head
    tl.store(place + at, acc / total, mask=at < DV)
    tl.store(place + DV, tl.where(l_i > 0, (m_i + tl.log2(total)) * LN_2, NO_KEYS))
