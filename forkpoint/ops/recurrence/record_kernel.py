"""Rows whose states are written every few tokens, in Triton: see RecordIndex. record.py has the formulas.

A first kernel does for each token and key head what does not need the state: normed keys and queries, gates, and what a
key and a query find in the records and in the tokens of the row before it. The second reads states, a few value rows in
each of many programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, capped_registers, overlap, straight
from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.metadata import RecordIndex
from forkpoint.ops.parameters import Recurrence, RecurrenceParams
from forkpoint.ops.recurrence.decode_kernel import normed
from forkpoint.ops.recurrence.gates import L2_EPS, checked, decay, key_block, modes, sizes, weight
from forkpoint.ops.recurrence.lines import GATES, end_of_line, extent, places, read_line, write_line
from forkpoint.ops.recurrence.state_rows import SIDE, advance, fold, product, state_tile
from forkpoint.ops.recurrence.straight_record_kernel import straight_record_kernel

FOLDS = 2  # records that are folded together
WINDOW = 2  # tokens of a row with drafts that read the state together
MOST_REGISTERS = 128  # of their programs: for the room of three there are four


@triton.jit
def _heads_kernel(
    mixed,
    a,
    b,
    a_log,
    dt_bias,
    vectors,
    gates,
    keys,
    scales,
    decays,
    cu_tokens,
    line,
    written,
    held,
    mixed_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    INTERVAL: tl.constexpr,
    LENGTH: tl.constexpr,
    PAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DELTA: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIDE: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of one key head of a row, with the value heads that share it; also records keys and decays."""
    pid = tl.program_id(0)
    key_head, row = pid % H, pid // H
    first = tl.load(cu_tokens + row).to(tl.int64)
    length = (tl.load(cu_tokens + row + 1) - first).to(tl.int32)
    start, folded, rest = extent(row, written, held, INTERVAL)
    own = tl.load(line + row).to(tl.int64) * LENGTH
    col, past = tl.arange(0, BLOCK_K), tl.arange(0, PAST)
    # Value heads are padded to a power of two; of entries those kept come first, then the row's tokens.
    head = key_head * (HV // H) + tl.arange(0, GROUP)
    shared = tl.arange(0, GROUP) < HV // H
    kept, fresh = past < rest, (past >= rest) & (past < rest + length)
    near, entry = first + past - rest, own + places(start + folded, past, LENGTH, STRAIGHT)
    end = end_of_line(start + folded, 0, rest, LENGTH)
    old_at, there = state_tile(keys, (entry * H + key_head) * K, kept, K, BLOCK_K, SIDE)
    others = read_line(old_at, there, past[:, None, None], end, LENGTH, H * K, STRAIGHT)
    decay_at = decays + entry[:, None] * HV + head[None, :]
    old_g = read_line(decay_at, kept[:, None] & shared[None, :], past[:, None], end, LENGTH, HV, STRAIGHT)
    scale_at = scales + entry * H + key_head
    old_scale = read_line(scale_at, kept, past, end, LENGTH, H, STRAIGHT)
    rate, bias = tl.load(a_log + head, mask=shared, other=0.0), tl.load(dt_bias + head, mask=shared, other=0.0)
    await_inputs(OVERLAP)  # the launch before has written none of what is loaded above
    key_at = mixed + first * mixed_stride + (H + key_head) * K + col
    b_at, present = b + first * b_stride + head, (col < K) & (length > 0)
    if not STRAIGHT:
        raw, raw_q = tl.load(key_at, mask=present, other=0.0), tl.load(key_at - H * K, mask=present, other=0.0)
        raw_b = tl.load(b_at, mask=shared & (length > 0), other=0.0)
    new_at, there = state_tile(mixed, near * mixed_stride + (H + key_head) * K, fresh, K, BLOCK_K, SIDE)
    fresh_keys = tl.load(new_at, mask=there, other=0.0)
    raw_a = tl.load(a + near[:, None] * a_stride + head[None, :], mask=fresh[:, None] & shared[None, :], other=0.0)
    others = tl.where(fresh[:, None, None], fresh_keys, others).to(tl.float32)
    g, step = decay(raw_a, rate[None, :], bias[None, :], LOW, HIGH)
    g = tl.where(fresh[:, None], g, old_g)
    since = tl.cumsum(g, axis=0)
    new_scale = tl.full((PAST,), 1.0, tl.float32)
    if DELTA:
        new_scale = tl.rsqrt(tl.sum(tl.sum(others * others, axis=1), axis=1) + L2_EPS)
    scaled = tl.where(fresh, new_scale, old_scale)
    end = end_of_line(start + folded, rest, rest + length, LENGTH)
    write_line(scale_at, new_scale, fresh, past, end, LENGTH, H, STRAIGHT)
    write_line(decay_at, g, fresh[:, None] & shared[None, :], past[:, None], end, LENGTH, HV, STRAIGHT)
    for t in range(length):
        if STRAIGHT:  # the compiler for NPUs takes no pointers that a branch moves
            own_at, own_b = key_at + t * mixed_stride, b_at + t * b_stride
            raw, raw_q = tl.load(own_at, mask=col < K, other=0.0), tl.load(own_at - H * K, mask=col < K, other=0.0)
            raw_b = tl.load(own_b, mask=shared, other=0.0)
        key, q, k = raw, raw_q.to(tl.float32), raw.to(tl.float32)
        token, ring, is_own = first + t, own + (start + folded + rest + t) % LENGTH, (past == rest + t)[:, None]
        if DELTA:
            q, k = normed(q, k, scale)
            beta = weight(raw_b, DOUBLE_BETA)
        else:
            beta = tl.sum(tl.where(is_own, step, 0.0), axis=0)
        if not STRAIGHT and t + 1 < length:  # the next token's, ahead of the stores
            key_at, b_at = key_at + mixed_stride, b_at + b_stride
            raw, raw_q = tl.load(key_at, mask=col < K, other=0.0), tl.load(key_at - H * K, mask=col < K, other=0.0)
            raw_b = tl.load(b_at, mask=shared, other=0.0)
        by_key, by_query = scaled * product(others, k, SIDE), scaled * product(others, q, SIDE)
        total = tl.sum(tl.where(is_own, since, 0.0), axis=0)
        left = tl.where((past < rest + t)[:, None], tl.exp(total[None, :] - since), 0.0)
        tl.store(keys + (ring * H + key_head) * K + col, key, mask=col < K)
        vector_at = vectors + (token * H + key_head) * 2 * K + col
        tl.store(vector_at, k, mask=col < K)
        tl.store(vector_at + K, q, mask=col < K)
        gate_at = gates + (token * HV + head) * (GATES + 2 * PAST)
        tl.store(gate_at, tl.exp(total), mask=shared)
        tl.store(gate_at + 1, beta, mask=shared)
        tl.store(gate_at + 2, tl.sum(k * q, axis=0), mask=shared)
        found_at = gate_at[None, :] + GATES + past[:, None]
        tl.store(found_at, left * by_key[:, None], mask=shared[None, :])
        tl.store(found_at + PAST, left * by_query[:, None], mask=shared[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _record_kernel(
    mixed,
    skip,
    pool,
    out,
    vectors,
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
    TILES_V: tl.constexpr,
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    FOLDS: tl.constexpr,
    COMPUTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_V value rows of one head of one row: the state is read, and written where it is taken on or moves. `mixed`
    begins with the values."""
    pid = tl.program_id(0)
    tile, head, row = pid % TILES_V, (pid // TILES_V) % HV, pid // (TILES_V * HV)
    at, past = tile * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, PAST)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    own, position = tl.load(line + row).to(tl.int64), tl.load(mark + row)
    first = tl.load(cu_tokens + row).to(tl.int64)
    length, last = (tl.load(cu_tokens + row + 1) - first).to(tl.int32), tl.load(cu_tokens + num_rows)
    start, folded, rest = extent(row, written, held, INTERVAL)
    slot_at, inside = state_tile(pool + head * (V * K), at * K, at < V, K, BLOCK_K)
    state = tl.zeros(inside.shape, tl.float32)
    if source >= 0:
        state = tl.load(slot_at + source * slot_stride, mask=inside, other=0.0).to(tl.float32)
    update_at = updates + (own * LINE * HV + head) * V + at
    ring = ((start + folded + past) % LINE) * (HV * V)
    kept_here = (past < rest)[:, None] & (at < V)[None, :]
    kept = tl.load(update_at[None, :] + ring[:, None], mask=kept_here, other=0.0)
    position = tl.where(position <= folded, position, 0)
    middle = tl.where(position > 0, position, folded)
    if folded > 0:
        state = fold(
            state, 0, middle, start, own, head, at, updates, keys, scales, decays,
            H, HV, K, V, LINE, LENGTH, PAST, BLOCK_K, FOLDS,
        )  # fmt: skip
    await_inputs(OVERLAP)  # the first kernel has waited for all that is loaded above
    if position > 0:
        marked = slot_at + tl.load(mark_dst + row).to(tl.int64) * slot_stride
        tl.store(marked, state.to(pool.dtype.element_ty), mask=inside)
        if middle < folded:
            state = fold(
                state, middle, folded, start, own, head, at, updates, keys, scales, decays,
                H, HV, K, V, LINE, LENGTH, PAST, BLOCK_K, FOLDS,
            )  # fmt: skip
    if (target >= 0) & ((folded > 0) | (source != target)):
        tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)
    if COMPUTES:
        tl.debug_barrier()  # what is read of the line above is written over
        begin, whole = start + folded + rest, length - length % CHUNK
        for t in range(0, whole, CHUNK):
            kept = advance(
                state, kept, t, length, first, begin, rest, head, at, mixed, mixed_stride, skip, out, vectors, gates,
                update_at, H, HV, K, V, LINE, PAST, BLOCK_K, DELTA, CHUNK,
            )  # fmt: skip
        if CHUNK > 1:
            for t in range(whole, length):
                kept = advance(
                    state, kept, t, length, first, begin, rest, head, at, mixed, mixed_stride, skip, out, vectors,
                    gates, update_at, H, HV, K, V, LINE, PAST, BLOCK_K, DELTA, 1,
                )  # fmt: skip
        for token in range(last + row, num_tokens, num_rows):  # padding's
            nothing = tl.zeros((BLOCK_V,), out.dtype.element_ty)
            tl.store(out + (token * HV + head) * V + at, nothing, mask=at < V)


def recurrence_record(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Sequence[Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """See `table.RecurrenceRecord`; what tokens of no row get is zero."""
    b, out = checked(params.spec, mixed, a, b, pool, out)
    launch(mixed, a, b, params, pool, index, records, out)
    return out


def recurrence_settle(pool: Tensor, index: RecordIndex, records: Sequence[Tensor]) -> None:
    """See `table.RecurrenceSettle`."""
    (num_v_heads, value_dim), (num_k_heads, key_dim) = records[0].shape[2:], records[1].shape[2:]
    spec = Recurrence(num_k_heads, num_v_heads, key_dim, value_dim)
    none = pool.new_empty(0, 1)
    launch(none, none, none, RecurrenceParams(spec, none, none), pool, index, records, none)


def launch(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Sequence[Tensor],
    out: Tensor,
    made: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Both kernels, or the second alone with what the first would have `made`; then `mixed` are values alone."""
    spec, (updates, *kept) = params.spec, records
    assert all(record.is_contiguous() for record in records), "records must be dense"
    num_tokens, num_rows, past = mixed.shape[0], len(index), triton.next_power_of_2(updates.shape[1])
    form = straight(pool.device)
    one_by_one = form["STRAIGHT"]
    chunk = 1 if num_tokens <= num_rows or one_by_one else WINDOW
    states = 2 if pool.element_size() == 2 and not one_by_one and chunk == 1 else chunk  # as many bytes of shorter ones
    block_v = min(launch_table(pool.device).state_values * states, triton.next_power_of_2(spec.value_dim))
    tiles_v = triton.cdiv(spec.value_dim, block_v)
    vectors, gates = made or (
        updates.new_empty(num_tokens, spec.num_k_heads, 2, spec.key_dim),
        updates.new_empty(num_tokens, spec.num_v_heads, GATES.value + 2 * past),
    )
    shapes = {**sizes(spec), "INTERVAL": index.interval, "LENGTH": kept[0].shape[1], "PAST": past}
    shapes["BLOCK_K"] = key_block(spec)
    options = {**overlap(pool.device, num_tokens), "num_warps": 1, "num_stages": 1}
    if num_tokens and made is None:
        _launch_heads(mixed, a, b, params, index, kept, vectors, gates, {**shapes, **form, **options})
    own = options | {"CHUNK": chunk, "FOLDS": FOLDS}
    if states > 1:
        own |= capped_registers(pool.device, MOST_REGISTERS)
    if one_by_one:
        own = {"num_warps": 1}
    (straight_record_kernel if one_by_one else _record_kernel)[(num_rows * spec.num_v_heads * tiles_v,)](
        mixed if made or one_by_one else mixed[:, 2 * spec.num_k_heads * spec.key_dim :],
        params.D,
        pool,
        out,
        vectors,
        gates,
        *records,
        *index.columns,
        num_rows,
        num_tokens,
        mixed.stride(0),
        pool.stride(0),
        **shapes,
        LINE=updates.shape[1],
        BLOCK_V=block_v,
        TILES_V=tiles_v,
        DELTA=spec.delta,
        COMPUTES=num_tokens > 0,
        **own,
    )


def _launch_heads(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    params: RecurrenceParams,
    index: RecordIndex,
    kept: Sequence[Tensor],
    vectors: Tensor,
    gates: Tensor,
    options: dict[str, Any],
) -> None:
    """The first kernel; `kept` are the records of keys, scales and decays."""
    spec = params.spec
    _heads_kernel[(len(index) * spec.num_k_heads,)](
        mixed,
        a,
        b,
        params.A_log,
        params.dt_bias,
        vectors,
        gates,
        *kept,
        index.cu_tokens,
        index.line,
        index.written,
        index.held,
        *(x.stride(0) for x in (mixed, a, b)),
        spec.key_dim**-0.5,
        GROUP=triton.next_power_of_2(spec.num_v_heads // spec.num_k_heads),
        **modes(spec),
        SIDE=options["BLOCK_K"] if options["STRAIGHT"] else SIDE.value,
        **options,
    )
