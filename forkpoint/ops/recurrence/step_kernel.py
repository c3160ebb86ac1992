"""Rows of one token each, whose states are written every few tokens, in Triton: the short convolution and what does not
need the state in one launch, for each key head with the value heads that share it. Then record_kernel.py goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu
from forkpoint.ops.conv1d.kernel import check_layout, load_rows
from forkpoint.ops.launch import await_inputs, capped_registers, overlap
from forkpoint.ops.metadata import DecodeIndex, RecordIndex
from forkpoint.ops.parameters import RecurrenceParams
from forkpoint.ops.recurrence.decode_kernel import normed
from forkpoint.ops.recurrence.gates import L2_EPS, checked, decay, key_block, modes, sizes, weight
from forkpoint.ops.recurrence.lines import GATES, extent
from forkpoint.ops.recurrence.record_kernel import FOLDS, MOST_REGISTERS, launch
from forkpoint.ops.recurrence.state_rows import fold, product, state_tile

MOST_CHANNELS = 512  # of the value heads of a key head
FEW_ROWS = 64  # above, a program takes several parts of a state, one after another
TURNS, VALUES, STAGES = 2, 8, 3
SIDE = 64  # keys of a value row that lie side by side in a tile


@triton.jit
def _convolved(x, old, taps, new, row_stride, present, kept, W: tl.constexpr):
    """A token's channels in x's dtype, as `conv_update` stores them; their window goes on by one."""
    newest = tl.load(x, mask=present, other=0.0)
    total = tl.zeros(present.shape, tl.float32)
    for j in tl.static_range(W - 1):
        total += old[j].to(newest.dtype).to(tl.float32) * taps[j].to(tl.float32)
        if j > 0:
            tl.store(new + (j - 1) * row_stride, old[j], mask=kept)
    total += newest.to(tl.float32) * taps[W - 1].to(tl.float32)
    tl.store(new + (W - 2) * row_stride, newest.to(new.dtype.element_ty), mask=kept)
    return silu(total).to(newest.dtype)


@triton.jit
def _step_kernel(
    mixed,
    taps,
    windows,
    a,
    b,
    a_log,
    dt_bias,
    values,
    vectors,
    gates,
    keys,
    scales,
    decays,
    src,
    dst,
    cu_tokens,
    line,
    written,
    held,
    mixed_stride,
    slot_stride,
    row_stride,
    tap_channel,
    tap_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    INTERVAL: tl.constexpr,
    LENGTH: tl.constexpr,
    PAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row r's token is the r-th. As `_heads_kernel`, of what the convolution makes of `mixed`; `values` get the value
    heads' part of that."""
    SHARE: tl.constexpr = HV // H
    pid = tl.program_id(0)
    key_head, row = pid % H, (pid // H).to(tl.int64)
    live = tl.load(cu_tokens + row + 1) > tl.load(cu_tokens + row)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    start, folded, rest = extent(row, written, held, INTERVAL)
    own = tl.load(line + row).to(tl.int64) * LENGTH
    # Windows and taps.
    col, at, past = tl.arange(0, BLOCK_K), tl.arange(0, CHANNELS), tl.arange(0, PAST)
    q_channel, v_channel = key_head * K + col, 2 * H * K + key_head * SHARE * V + at
    k_channel = H * K + q_channel
    is_key, is_value = (col < K) & live, (at < SHARE * V) & live
    old, new = windows + source * slot_stride, windows + target * slot_stride
    seen, kept = source >= 0, target >= 0
    q_old = load_rows(old + q_channel, row_stride, is_key & seen, W - 1)
    k_old = load_rows(old + k_channel, row_stride, is_key & seen, W - 1)
    v_old = load_rows(old + v_channel, row_stride, is_value & seen, W - 1)
    q_taps = load_rows(taps + q_channel * tap_channel, tap_stride, is_key, W)
    k_taps = load_rows(taps + k_channel * tap_channel, tap_stride, is_key, W)
    v_taps = load_rows(taps + v_channel * tap_channel, tap_stride, is_value, W)
    # Records.
    head = key_head * SHARE + tl.arange(0, GROUP)
    shared, earlier = (tl.arange(0, GROUP) < SHARE) & live, (past < rest) & live
    entry = own + (start + folded + past) % LENGTH
    old_at, there = state_tile(keys, (entry * H + key_head) * K, earlier, K, BLOCK_K)
    others = tl.load(old_at, mask=there, other=0.0).to(tl.float32)
    both = earlier[:, None] & shared[None, :]
    old_g = tl.load(decays + entry[:, None] * HV + head[None, :], mask=both, other=0.0)
    old_scale = tl.load(scales + entry * H + key_head, mask=earlier, other=0.0)
    rate, bias = tl.load(a_log + head, mask=shared, other=0.0), tl.load(dt_bias + head, mask=shared, other=0.0)
    await_inputs(OVERLAP)  # none of the above is written by the launch before
    raw_a = tl.load(a + row * a_stride + head, mask=shared, other=0.0)
    raw_b = tl.load(b + row * b_stride + head, mask=shared, other=0.0)
    token = mixed + row * mixed_stride
    key = _convolved(token + k_channel, k_old, k_taps, new + k_channel, row_stride, is_key, is_key & kept, W)
    query = _convolved(token + q_channel, q_old, q_taps, new + q_channel, row_stride, is_key, is_key & kept, W)
    value = _convolved(token + v_channel, v_old, v_taps, new + v_channel, row_stride, is_value, is_value & kept, W)
    tl.store(values + row * (HV * V) + key_head * SHARE * V + at, value, mask=is_value)
    g, step = decay(raw_a, rate, bias, LOW, HIGH)
    q, k = query.to(tl.float32), key.to(tl.float32)
    beta, new_scale = step, 1.0
    if DELTA:
        new_scale = tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
        q, k = normed(q, k, scale)
        beta = weight(raw_b, DOUBLE_BETA)
    since = tl.cumsum(old_g, axis=0)  # of none behind the earlier ones
    total = tl.sum(old_g, axis=0) + g
    left = tl.where(earlier[:, None], tl.exp(total[None, :] - since), 0.0)
    by_key, by_query = old_scale * product(others, k), old_scale * product(others, q)
    ring = own + (start + folded + rest) % LENGTH
    tl.store(keys + (ring * H + key_head) * K + col, key, mask=is_key)
    tl.store(scales + ring * H + key_head, new_scale, mask=live)
    tl.store(decays + ring * HV + head, g, mask=shared)
    vector_at = vectors + (row * H + key_head) * 2 * K + col
    tl.store(vector_at, k, mask=is_key)
    tl.store(vector_at + K, q, mask=is_key)
    gate_at = gates + (row * HV + head) * (GATES + 2 * PAST)
    tl.store(gate_at, tl.exp(total), mask=shared)
    tl.store(gate_at + 1, beta, mask=shared)
    tl.store(gate_at + 2, tl.zeros_like(beta) + tl.sum(k * q, axis=0), mask=shared)
    found_at = gate_at[None, :] + GATES + past[:, None]
    tl.store(found_at, left * by_key[:, None], mask=shared[None, :])
    tl.store(found_at + PAST, left * by_query[:, None], mask=shared[None, :])


@triton.jit
def _token(
    state,
    kept,
    k,
    q,
    by_key,
    by_query,
    grown,
    beta,
    both,
    passed,
    value_at,
    out_at,
    new_at,
    at,
    live,
    V: tl.constexpr,
    DELTA: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The answer of value rows `at`, and their record."""
    value = tl.load(value_at + at, mask=at < V, other=0.0).to(tl.float32)
    update = value
    if DELTA:
        update -= grown * product(state, k, SIDE) + tl.sum(by_key * kept, axis=0)
    update *= beta
    answer = grown * product(state, q, SIDE) + tl.sum(by_query * kept, axis=0) + both * update + passed * value
    answer = tl.where(live, answer, 0.0)  # padding's
    tl.store(out_at + at, answer.to(out_at.dtype.element_ty), mask=at < V)
    tl.store(new_at + at, update, mask=(at < V) & live)


@triton.jit
def _state_kernel(
    values,
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
    TURNS: tl.constexpr,
    DELTA: tl.constexpr,
    FOLDS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `_record_kernel`, TURNS times BLOCK_V value rows, one turn after another."""
    PARTS: tl.constexpr = (V + BLOCK_V * TURNS - 1) // (BLOCK_V * TURNS)
    pid = tl.program_id(0)
    head, row = (pid // PARTS) % HV, (pid // (PARTS * HV)).to(tl.int64)
    key_head = head // (HV // H)
    col, past = tl.arange(0, BLOCK_K), tl.arange(0, PAST)
    at = pid % PARTS * (BLOCK_V * TURNS) + tl.arange(0, BLOCK_V)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    own, position = tl.load(line + row).to(tl.int64), tl.load(mark + row)
    live = tl.load(cu_tokens + row + 1) > tl.load(cu_tokens + row)
    start, folded, rest = extent(row, written, held, INTERVAL)
    heads = pool + head * (V * K)
    ring = (((start + folded + past) % LINE) * (HV * V))[:, None]
    line_at = updates + (own * LINE * HV + head) * V
    here = (past < rest)[:, None]
    place, inside = state_tile(heads + source * slot_stride, at * K, (at < V) & (source >= 0), K, BLOCK_K, SIDE)
    state = tl.load(place, mask=inside, other=0.0)
    kept = tl.load(line_at + ring + at[None, :], mask=here & (at < V)[None, :], other=0.0)
    position = tl.where(position <= folded, position, 0)
    middle = tl.where(position > 0, position, folded)
    marked = tl.load(mark_dst + row).to(tl.int64)
    stores = (target >= 0) & ((folded > 0) | (source != target))
    await_inputs(OVERLAP)  # the first kernel has waited for all that is loaded above
    vector_at = vectors + (row * H + key_head) * 2 * K + col
    k, q = tl.load(vector_at, mask=col < K, other=0.0), tl.load(vector_at + K, mask=col < K, other=0.0)
    gate_at = gates + (row * HV + head) * (GATES + 2 * PAST)
    grown, beta, both = tl.load(gate_at), tl.load(gate_at + 1), tl.load(gate_at + 2)
    by_key, by_query = tl.load(gate_at + GATES + past)[:, None], tl.load(gate_at + GATES + PAST + past)[:, None]
    passed = 0.0
    if skip is not None:
        passed = tl.load(skip + head)
    new_at = line_at + (start + folded + rest) % LINE * (HV * V)
    value_at, out_at = values + (row * HV + head) * V, out + (row * HV + head) * V
    if (folded > 0) | stores:
        for turn in range(TURNS):
            if turn > 0:
                at += BLOCK_V
                there = (at < V) & (source >= 0)
                place, inside = state_tile(heads + source * slot_stride, at * K, there, K, BLOCK_K, SIDE)
                state = tl.load(place, mask=inside, other=0.0)
                kept = tl.load(line_at + ring + at[None, :], mask=here & (at < V)[None, :], other=0.0)
            wide = state.to(tl.float32)
            place, inside = state_tile(heads, at * K, at < V, K, BLOCK_K, SIDE)
            if folded > 0:
                wide = fold(
                    wide, 0, middle, start, own, head, at, updates, keys, scales, decays,
                    H, HV, K, V, LINE, LENGTH, PAST, BLOCK_K, FOLDS, SIDE,
                )  # fmt: skip
            if position > 0:
                tl.store(place + marked * slot_stride, wide.to(pool.dtype.element_ty), mask=inside)
                if middle < folded:
                    wide = fold(
                        wide, middle, folded, start, own, head, at, updates, keys, scales, decays,
                        H, HV, K, V, LINE, LENGTH, PAST, BLOCK_K, FOLDS, SIDE,
                    )  # fmt: skip
            if stores:
                tl.store(place + target * slot_stride, wide.to(pool.dtype.element_ty), mask=inside)
            tl.debug_barrier()  # what is read of the line above is written over
            _token(
                wide, kept, k, q, by_key, by_query, grown, beta, both, passed,
                value_at, out_at, new_at, at, live, V, DELTA, SIDE,
            )  # fmt: skip
    else:  # nothing but reads, which the compiler starts ahead
        _token(
            state.to(tl.float32), kept, k, q, by_key, by_query, grown, beta, both, passed,
            value_at, out_at, new_at, at, live, V, DELTA, SIDE,
        )  # fmt: skip
        for turn in tl.range(1, TURNS, num_stages=STAGES):
            later = at + turn * BLOCK_V
            place, inside = state_tile(
                heads + source * slot_stride, later * K, (later < V) & (source >= 0), K, BLOCK_K, SIDE
            )
            state = tl.load(place, mask=inside, other=0.0)
            kept = tl.load(line_at + ring + later[None, :], mask=here & (later < V)[None, :], other=0.0)
            _token(
                state.to(tl.float32), kept, k, q, by_key, by_query, grown, beta, both, passed,
                value_at, out_at, new_at, later, live, V, DELTA, SIDE,
            )  # fmt: skip


def conv_record(
    mixed: Tensor,
    taps: Tensor,
    windows: Tensor,
    rows: DecodeIndex,
    a: Tensor,
    b: Tensor | None,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Sequence[Tensor],
    out: Tensor | None = None,
) -> Tensor | None:
    """See `table.ConvRecord`: few value heads share a key head."""
    spec, num_rows = params.spec, mixed.shape[0]
    group = spec.num_v_heads // spec.num_k_heads
    if spec.per_key or group * spec.value_dim > MOST_CHANNELS:
        return None
    b, out = checked(spec, mixed, a, b, pool, out)
    check_layout(mixed, windows)
    assert num_rows == len(index) and all(record.is_contiguous() for record in records)
    updates, *kept = records
    past = triton.next_power_of_2(updates.shape[1])
    values = mixed.new_empty(num_rows, spec.num_v_heads, spec.value_dim)
    vectors = updates.new_empty(num_rows, spec.num_k_heads, 2, spec.key_dim)
    gates = updates.new_empty(num_rows, spec.num_v_heads, GATES.value + 2 * past)
    shapes = {**sizes(spec), "INTERVAL": index.interval, "LENGTH": kept[0].shape[1], "PAST": past}
    shapes["BLOCK_K"] = key_block(spec)
    options = {**overlap(mixed.device, num_rows), "num_warps": 1, "num_stages": 1}
    _step_kernel[(num_rows * spec.num_k_heads,)](
        mixed,
        taps,
        windows,
        a,
        b,
        params.A_log,
        params.dt_bias,
        values,
        vectors,
        gates,
        *kept,
        rows.src,
        rows.dst,
        index.cu_tokens,
        index.line,
        index.written,
        index.held,
        mixed.stride(0),
        *windows.stride()[:2],
        *taps.stride(),
        a.stride(0),
        b.stride(0),
        spec.key_dim**-0.5,
        **shapes,
        W=taps.shape[1],
        GROUP=triton.next_power_of_2(group),
        CHANNELS=triton.next_power_of_2(group * spec.value_dim),
        **modes(spec),
        **options,
    )
    if num_rows <= FEW_ROWS:
        launch(values.flatten(1), a, b, params, pool, index, records, out, (vectors, gates))
    else:
        _go_on(values, params, pool, index, records, out, vectors, gates, {**shapes, **options})
    return out


def _go_on(
    values: Tensor,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Sequence[Tensor],
    out: Tensor,
    vectors: Tensor,
    gates: Tensor,
    options: dict[str, Any],
) -> None:
    """By what `_step_kernel` has left in `values`, `vectors` and `gates`, of more than FEW_ROWS rows."""
    spec = params.spec
    block_v = min(VALUES, triton.next_power_of_2(spec.value_dim))
    _state_kernel[(len(index) * spec.num_v_heads * triton.cdiv(spec.value_dim, block_v * TURNS),)](
        values,
        params.D,
        pool,
        out,
        vectors,
        gates,
        *records,
        *index.columns,
        pool.stride(0),
        LINE=records[0].shape[1],
        BLOCK_V=block_v,
        TURNS=TURNS,
        DELTA=spec.delta,
        FOLDS=FOLDS,
        SIDE=SIDE,
        STAGES=STAGES,
        **options,
        **capped_registers(pool.device, MOST_REGISTERS),
    )
