"""Recurrence steps in Triton, for rows of one token and for rows with drafts. reference.py has the formulas.

A token has the same bits in both kinds of rows. A program computes a few value rows of one head of one row: it reads
that part of the state once and writes it once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.metadata import DecodeIndex, VerifyIndex
from forkpoint.ops.parameters import Out, Records, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.gates import (
    L2_EPS,
    decay,
    described,
    head_tile,
    key_block,
    key_decay,
    no_tokens,
    result,
    weight,
)
from forkpoint.ops.rounding import ceil_div, next_power_of_2

UNIT = 16  # elements and bytes; the compiler specialises kernels on whether a stride or address is a multiple


@triton.jit
def normed(q, k, scale):
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
    return q, k


@triton.jit
def _updated(state, kept, fresh, k, PER_KEY: tl.constexpr):
    """Return `e^g S + u k^T`. With PER_KEY, `state` has decayed already."""
    return tl.fma(fresh[:, None], k[None, :], state) if PER_KEY else kept * state + fresh[:, None] * k[None, :]


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _step_kernel(
    mixed,
    a,
    b,
    a_log,
    dt_bias,
    skip,
    pool,
    out,
    updates,
    keys,
    decays,
    src,
    dst,
    cu_tokens,
    pending,
    mark,
    mark_dst,
    read,
    write,
    num_rows,
    num_tokens,
    mixed_stride,
    a_stride,
    b_stride,
    slot_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    PER_KEY: tl.constexpr,
    BOUND: tl.constexpr,
    COMPUTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK_V value rows of one head of one row: read the state, fold records, compute tokens, write the state.

    Without `cu_tokens`, rows have one token each and no records to fold. Without COMPUTES there are no tokens."""
    await_inputs(OVERLAP)
    tile, head, row = head_tile(HV, V, BLOCK_V)
    key_head = head // (HV // H)
    col, at = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    inside = (at < V)[:, None] & (col < K)[None, :]
    slot_at = pool + head * (V * K) + at[:, None] * K + col[None, :]
    state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    if source >= 0:
        state = tl.load(slot_at + source * slot_stride, mask=inside, other=0.0).to(tl.float32)
    first, length, line = row.to(tl.int64), 1, 0
    DRAFTS: tl.constexpr = cu_tokens is not None
    if DRAFTS:
        entry = tl.load(read + row).to(tl.int64) * MOST
        position = tl.load(mark + row)
        for i in range(tl.load(pending + row)):
            fresh = tl.load(updates + ((entry + i) * HV + head) * V + at, mask=at < V, other=0.0)
            k = tl.load(keys + ((entry + i) * H + key_head) * K + col, mask=col < K, other=0.0)
            if PER_KEY:
                kept = tl.load(decays + ((entry + i) * HV + head) * K + col, mask=col < K, other=0.0)
                state = _updated(state * kept[None, :], kept, fresh, k, True)
            else:
                state = _updated(state, tl.load(decays + (entry + i) * HV + head), fresh, k, False)
            state = state.to(pool.dtype.element_ty).to(tl.float32)
            if i + 1 == position:
                marked = slot_at + tl.load(mark_dst + row).to(tl.int64) * slot_stride
                tl.store(marked, state.to(pool.dtype.element_ty), mask=inside)
        if COMPUTES:
            first = tl.load(cu_tokens + row).to(tl.int64)
            length = tl.load(cu_tokens + row + 1).to(tl.int64) - first
            line = tl.load(write + row).to(tl.int64) * MOST
    if not COMPUTES:
        if target >= 0:
            tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)
    else:
        if DRAFTS:  # noqa: SIM102 - the compiler for NPUs takes both halves of an `and` as known at run time
            if (target >= 0) & (length > 1):
                tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)
        for t in range(length):
            token, entry = first + t, line + t
            token_at, a_at, b_at = mixed + token * mixed_stride, a + token * a_stride, b + token * b_stride
            key_at = token_at + key_head * K + col
            q = tl.load(key_at, mask=col < K, other=0.0).to(tl.float32)
            k = tl.load(key_at + H * K, mask=col < K, other=0.0).to(tl.float32)
            v = tl.load(token_at + 2 * H * K + head * V + at, mask=at < V, other=0.0).to(tl.float32)
            if DELTA:
                q, k = normed(q, k, scale)
            if PER_KEY:
                raw = tl.load(a_at + head * K + col, mask=col < K, other=0.0)
                bias = tl.load(dt_bias + head * K + col, mask=col < K, other=0.0)
                kept = tl.exp(key_decay(raw, tl.load(a_log + head), bias, BOUND))
                state *= kept[None, :]
                fresh = weight(tl.load(b_at + head), DOUBLE_BETA) * (v - tl.sum(state * k[None, :], axis=1))
                state = _updated(state, kept, fresh, k, True)
                answer = tl.sum(state * q[None, :], axis=1)
            else:
                raw = tl.load(a_at + head)
                if DELTA:
                    beta = weight(tl.load(b_at + head), DOUBLE_BETA)
                g, step = decay(raw, tl.load(a_log + head), tl.load(dt_bias + head), LOW, HIGH)
                kept = tl.exp(g)
                fresh = beta * (v - kept * tl.sum(state * k[None, :], axis=1)) if DELTA else step * v
                answer = kept * tl.sum(state * q[None, :], axis=1) + fresh * tl.sum(k * q, axis=0)
                if skip is not None:
                    answer += tl.load(skip + head) * v
                state = _updated(state, kept, fresh, k, False)
            tl.store(out + (token * HV + head) * V + at, answer.to(out.dtype.element_ty), mask=at < V)
            if DRAFTS:  # noqa: SIM102
                if length > 1:
                    tl.store(updates + (entry * HV + head) * V + at, fresh, mask=at < V)
                    if tile == 0:
                        if PER_KEY:
                            tl.store(decays + (entry * HV + head) * K + col, kept, mask=col < K)
                        else:
                            tl.store(decays + entry * HV + head, kept)
                        if head % (HV // H) == 0:
                            tl.store(keys + (entry * H + key_head) * K + col, k, mask=col < K)
            state = state.to(pool.dtype.element_ty).to(tl.float32)
        if (target >= 0) & (length == 1):
            tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)
        if DRAFTS:
            for token in range(tl.load(cu_tokens + num_rows) + row, num_tokens, num_rows):  # padding's
                nothing = tl.zeros((BLOCK_V,), out.dtype.element_ty)
                tl.store(out + (token * HV + head) * V + at, nothing, mask=at < V)


def recurrence_decode(
    inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: DecodeIndex, out: Out = None
) -> Tensor:
    """Advance each row's state by one token; return the outputs `[B, HV, V]`, in `out` if it is given."""
    return _launch(inputs, params, pool, index, (), result(inputs, params, pool, out))


def recurrence_verify(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    pool: Tensor,
    index: VerifyIndex,
    records: Records,
    out: Out = None,
) -> Tensor:
    """Compute the tokens of rows with drafts; return `[T, HV, V]`, in `out` if it is given (`table.Recorded`).

    Tokens of no row get zeros.
    """
    return _launch(inputs, params, pool, index, records, result(inputs, params, pool, out))


def recurrence_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """Fold the pending tokens' records into the states, and store the states at the marks."""
    inputs, params = no_tokens(pool, records)
    _launch(inputs, params, pool, index, records, inputs.mixed)


def _launch(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    pool: Tensor,
    index: DecodeIndex | VerifyIndex,
    records: Records,
    out: Tensor,
) -> Tensor:
    """Launch the step kernel and return `out`. Without `records`, rows have one token each."""
    spec, num_rows, num_tokens = params.spec, len(index), inputs.mixed.shape[0]
    assert all(record.is_contiguous() for record in records), "records must be dense"
    block_v = min(launch_table(pool.device).state_values, next_power_of_2(spec.value_dim))
    own = (*records, *index.columns) if isinstance(index, VerifyIndex) else (*[None] * 3, *index.columns, *[None] * 6)
    given, options = described(inputs._replace(mixed=_aligned(inputs.mixed)), params)
    options |= {"MOST": records[0].shape[1] if records else 0, "slot_stride": pool.stride(0)}
    options |= {"BLOCK_K": key_block(spec), "BLOCK_V": block_v, "COMPUTES": num_tokens > 0}
    options |= {"PER_KEY": spec.per_key, "BOUND": spec.bound or 0.0, **overlap(pool.device, num_tokens)}
    grid = (num_rows * spec.num_v_heads * ceil_div(spec.value_dim, block_v),)
    _step_kernel[grid](*given, params.D, pool, out, *own, num_rows, num_tokens, **options, num_warps=1, num_stages=1)
    return out


def _aligned(mixed: Tensor) -> Tensor:
    """Return `mixed`, or a copy whose rows start at multiples of UNIT elements and bytes.

    Otherwise the compiler would assign keys to other lanes in the variant that also stores them, and sums would have
    other bits with drafts than without."""
    if not len(mixed) or (mixed.stride(0) % UNIT == 0 and mixed.data_ptr() % UNIT == 0):
        return mixed
    width = mixed.shape[1]
    return mixed.new_empty(len(mixed), ceil_div(width, UNIT) * UNIT)[:, :width].copy_(mixed)
