"""Steps of a recurrence whose states are written every few tokens, in Triton; record.py has the formulas.

A first kernel does for each head what does not need its state: normed keys and queries, gates, and what a key and a
query find in the records. The second reads states, a few value rows in each of many programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.metadata import DecodeIndex, RecordIndex
from forkpoint.ops.parameters import RecurrenceParams
from forkpoint.ops.recurrence.decode_kernel import normed
from forkpoint.ops.recurrence.gates import checked, decay, key_block, modes, sizes, weight

GATES = tl.constexpr(4)  # decay since the slot's state, beta, key by query, nothing
FOUND = tl.constexpr(3)  # of each record: what the key finds, what the query finds, what is left of it
SIDE = tl.constexpr(32)  # keys of a value row that lie side by side in a tile


@triton.jit
def _tile(head_at, at, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr):
    """(pointers, which of them there are) of value rows `at` of a head's state, `[BLOCK_V, BLOCK_K / SIDE, SIDE]`.

    The compiler gives a warp's lanes to the axes by what it takes to be contiguous: eight to the last, four to the
    first. A sum over keys is then three exchanges between lanes for every four rows, not five for each.
    """
    col = tl.arange(0, BLOCK_K // SIDE)[None, :, None] * SIDE + tl.arange(0, SIDE)[None, None, :]
    row = at[:, None, None]
    return tl.max_contiguous(head_at + row * K + col, (2, 1, SIDE)), (row < V) & (col < K)


@triton.jit
def _beside(key):
    """A key as it lies beside each value row of a tile."""
    return tl.reshape(key, (key.shape[0] // SIDE, SIDE))[None, :, :]


@triton.jit
def _product(state, key):
    return tl.sum(tl.sum(state * _beside(key), axis=1), axis=1)


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
    sums,
    line,
    held,
    folds,
    mixed_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DELTA: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of one head of one row; also records its key and its sum of g."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    head, row = pid % HV, (pid // HV).to(tl.int64)
    key_head = head // (HV // H)
    col, past = tl.arange(0, BLOCK_K), tl.arange(0, MOST)
    own, count, whole = tl.load(line + row).to(tl.int64), tl.load(held + row), tl.load(folds + row) > 0
    key_at = mixed + row * mixed_stride + (H + key_head) * K + col
    k = tl.load(key_at, mask=col < K, other=0.0).to(tl.float32)
    q = tl.load(key_at - H * K, mask=col < K, other=0.0).to(tl.float32)
    raw_a = tl.load(a + row * a_stride + head)
    g, beta = decay(raw_a, tl.load(a_log + head), tl.load(dt_bias + head), LOW, HIGH)
    if DELTA:
        q, k = normed(q, k, scale)
        beta = weight(tl.load(b + row * b_stride + head), DOUBLE_BETA)
    kept_at = keys + (own * MOST * H + key_head) * K + col
    there = (past < count)[:, None] & (col < K)[None, :]
    kept = tl.load(kept_at[None, :] + (past * (H * K))[:, None], mask=there, other=0.0)
    sum_at = sums + own * MOST * HV + head
    before = tl.load(sum_at + past * HV, mask=past < count, other=0.0)
    total = g + tl.sum(tl.where(past == count - 1, before, 0.0), axis=0)
    left = tl.where(past < count, tl.exp(total - before), 0.0)
    gate_at = gates + pid.to(tl.int64) * (GATES + FOUND * MOST)
    tl.store(gate_at, tl.exp(total))
    tl.store(gate_at + 1, beta)
    tl.store(gate_at + 2, tl.sum(k * q, axis=0))
    tl.store(gate_at + GATES + past, left * tl.sum(kept * k[None, :], axis=1))
    tl.store(gate_at + GATES + MOST + past, left * tl.sum(kept * q[None, :], axis=1))
    tl.store(gate_at + GATES + 2 * MOST + past, left)
    records = (own >= 0) & (not whole)
    if records:
        tl.store(sum_at + count * HV, total)
    if head % (HV // H) == 0:
        vector_at = vectors + (row * H + key_head) * 2 * K + col
        tl.store(vector_at, k, mask=col < K)
        tl.store(vector_at + K, q, mask=col < K)
        if records:
            tl.store(kept_at + count * (H * K), k, mask=col < K)


@triton.jit
def _record_kernel(
    mixed,
    skip,
    pool,
    out,
    vectors,
    gates,
    updates,
    keys,
    src,
    dst,
    line,
    held,
    folds,
    mixed_stride,
    slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES_V: tl.constexpr,
    DELTA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_V value rows of one head of one row: the state is read, and written where all is folded or it moves."""
    pid = tl.program_id(0)
    tile, head, row = pid % TILES_V, (pid // TILES_V) % HV, (pid // (TILES_V * HV)).to(tl.int64)
    key_head = head // (HV // H)
    col, at, past = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, MOST)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    own, count, whole = tl.load(line + row).to(tl.int64), tl.load(held + row), tl.load(folds + row) > 0
    slot_at, inside = _tile(pool + head * (V * K), at, K, V, BLOCK_K)
    state = tl.zeros(inside.shape, tl.float32)
    if source >= 0:
        state = tl.load(slot_at + source * slot_stride, mask=inside, other=0.0).to(tl.float32)
    update_at = updates + (own * MOST * HV + head) * V + at
    there = (past < count)[:, None] & (at < V)[None, :]
    kept = tl.load(update_at[None, :] + (past * (HV * V))[:, None], mask=there, other=0.0)
    v = tl.load(mixed + row * mixed_stride + 2 * H * K + head * V + at, mask=at < V, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)  # the first kernel has waited for all that is loaded above
    vector_at = vectors + (row * H + key_head) * 2 * K + col
    k, q = tl.load(vector_at, mask=col < K, other=0.0), tl.load(vector_at + K, mask=col < K, other=0.0)
    gate_at = gates + (row * HV + head) * (GATES + FOUND * MOST)
    grown, beta, overlap = tl.load(gate_at), tl.load(gate_at + 1), tl.load(gate_at + 2)
    if DELTA:
        by_key = tl.load(gate_at + GATES + past)
        had = grown * _product(state, k) + tl.sum(by_key[:, None] * kept, axis=0)
        fresh = beta * (v - had)
    else:
        fresh = beta * v
    by_query = tl.load(gate_at + GATES + MOST + past)
    answer = grown * _product(state, q) + tl.sum(by_query[:, None] * kept, axis=0) + fresh * overlap
    if skip is not None:
        answer += tl.load(skip + head) * v
    tl.store(out + (row * HV + head) * V + at, answer.to(out.dtype.element_ty), mask=at < V)
    if whole:
        state = grown * state + fresh[:, None, None] * _beside(k)
        for i in range(count):
            left = tl.load(gate_at + GATES + 2 * MOST + i)
            u = tl.load(update_at + i * (HV * V), mask=at < V, other=0.0)
            key = tl.load(keys + ((own * MOST + i) * H + key_head) * K + col, mask=col < K, other=0.0)
            state += (left * u)[:, None, None] * _beside(key)
    elif own >= 0:
        tl.store(update_at + count * (HV * V), fresh, mask=at < V)
    if (target >= 0) & (whole | (source != target)):
        tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)


def recurrence_record(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    params: RecurrenceParams,
    pool: Tensor,
    index: DecodeIndex,
    kept: RecordIndex,
    records: Sequence[Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """See `table.RecurrenceRecord`."""
    spec, (updates, keys, sums), columns = params.spec, records, (kept.line, kept.held, kept.folds)
    b, out = checked(spec, mixed, a, b, pool, out)
    assert all(record.is_contiguous() for record in records), "records must be dense"
    num_rows, most = len(index), updates.shape[1]
    block_v = min(launch_table(pool.device).state_values, triton.next_power_of_2(spec.value_dim))
    tiles_v = triton.cdiv(spec.value_dim, block_v)
    vectors = updates.new_empty(num_rows, spec.num_k_heads, 2, spec.key_dim)
    gates = updates.new_empty(num_rows, spec.num_v_heads, GATES.value + FOUND.value * most)
    shapes = {**sizes(spec), "MOST": most, "BLOCK_K": key_block(spec)}
    launch = {**overlap(pool.device, num_rows), "num_warps": 1, "num_stages": 1}
    _heads_kernel[(num_rows * spec.num_v_heads,)](
        mixed,
        a,
        b,
        params.A_log,
        params.dt_bias,
        vectors,
        gates,
        keys,
        sums,
        *columns,
        *(x.stride(0) for x in (mixed, a, b)),
        spec.key_dim**-0.5,
        **shapes,
        **modes(spec),
        **launch,
    )
    _record_kernel[(num_rows * spec.num_v_heads * tiles_v,)](
        mixed,
        params.D,
        pool,
        out,
        vectors,
        gates,
        updates,
        keys,
        index.src,
        index.dst,
        *columns,
        mixed.stride(0),
        pool.stride(0),
        **shapes,
        BLOCK_V=block_v,
        TILES_V=tiles_v,
        DELTA=spec.delta,
        **launch,
    )
    return out
