"""The second kernel of record_kernel.py for devices that drop the masks of gathered loads and lack tuples (NPUs).

It processes records and tokens one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.recurrence.gates import head_tile
from forkpoint.ops.recurrence.lines import GATES, end_of_line, extent, places, read_line


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def straight_record_kernel(
    mixed,
    skip,
    pool,
    out,
    gates,
    updates,
    keys,
    scales,
    decays,
    src,
    dst,
    cu_tokens,
    line,
    written,
    held,
    mark,
    mark_dst,
    num_rows,
    num_tokens,
    mixed_stride,
    slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    INTERVAL: tl.constexpr,
    LINE: tl.constexpr,
    LENGTH: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    COMPUTES: tl.constexpr,
):
    """Compute BLOCK_V value rows of one head of one row, as `_record_kernel` does."""
    tile, head, row = head_tile(HV, V, BLOCK_V)
    key_head = head // (HV // H)
    col, at, past = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, PAST)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    own, position = tl.load(line + row).to(tl.int64), tl.load(mark + row)
    start, folded, rest = extent(row, written, held, INTERVAL)
    inside = (at < V)[:, None] & (col < K)[None, :]
    slot_at = pool + head * (V * K) + at[:, None] * K + col[None, :]
    state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    if source >= 0:
        state = tl.load(slot_at + source * slot_stride, mask=inside, other=0.0).to(tl.float32)
    update_at = updates + (own * LINE * HV + head) * V + at
    for i in range(folded):
        u = tl.load(update_at + (start + i) % LINE * (HV * V), mask=at < V, other=0.0)
        entry = own * LENGTH + (start + i) % LENGTH
        k = tl.load(keys + (entry * H + key_head) * K + col, mask=col < K, other=0.0).to(tl.float32)
        k *= tl.load(scales + entry * H + key_head)
        state = tl.exp(tl.load(decays + entry * HV + head)) * state + u[:, None] * k[None, :]
        if i + 1 == position:
            marked = slot_at + tl.load(mark_dst + row).to(tl.int64) * slot_stride
            tl.store(marked, state.to(pool.dtype.element_ty), mask=inside)
    if (target >= 0) & ((folded > 0) | (source != target)):
        tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)
    if COMPUTES:
        begin = start + folded
        kept_at = update_at[None, :] + places(begin, past, LINE, True)[:, None] * (HV * V)
        kept_here, end = (past < rest)[:, None] & (at < V)[None, :], end_of_line(begin, 0, rest, LINE)
        kept = read_line(kept_at, kept_here, past[:, None], end, LINE, HV * V, True)
        tl.debug_barrier()  # the records read above are overwritten below
        first = tl.load(cu_tokens + row).to(tl.int64)
        length = (tl.load(cu_tokens + row + 1) - first).to(tl.int32)
        for t in range(length):
            token = first + t
            mixed_at = mixed + token * mixed_stride
            q = tl.load(mixed_at + key_head * K + col, mask=col < K, other=0.0).to(tl.float32)
            k = tl.load(mixed_at + (H + key_head) * K + col, mask=col < K, other=0.0).to(tl.float32)
            value = tl.load(mixed_at + 2 * H * K + head * V + at, mask=at < V, other=0.0).to(tl.float32)
            gate_at = gates + (token * HV + head) * (GATES + 2 * PAST)
            before = past < rest + t  # scores of later tokens may be NaN
            update = value
            if DELTA:
                by_key = tl.load(gate_at + GATES + past, mask=before, other=0.0)
                update -= tl.load(gate_at) * tl.sum(state * k[None, :], axis=1) + tl.sum(by_key[:, None] * kept, axis=0)
            update *= tl.load(gate_at + 1)
            by_query = tl.load(gate_at + GATES + PAST + past, mask=before, other=0.0)
            answer = tl.load(gate_at + 3) * tl.sum(state * q[None, :], axis=1)
            answer += tl.sum(by_query[:, None] * kept, axis=0)
            answer += tl.load(gate_at + 2) * update
            if skip is not None:
                answer += tl.load(skip + head) * value
            tl.store(out + (token * HV + head) * V + at, answer.to(out.dtype.element_ty), mask=at < V)
            tl.store(update_at + (begin + rest + t) % LINE * (HV * V), update, mask=at < V)
            kept = tl.where((past == rest + t)[:, None], update[None, :], kept)
        for token in range(tl.load(cu_tokens + num_rows) + row, num_tokens, num_rows):  # padding
            nothing = tl.zeros((BLOCK_V,), out.dtype.element_ty)
            tl.store(out + (token * HV + head) * V + at, nothing, mask=at < V)
