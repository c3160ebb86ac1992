"""Steps of the selective scan in Triton, for rows of one token and for rows with drafts. reference.py has the formulas.

A token has the same bits in both kinds of rows. A program computes a block of channels of one row, with the state held
as `[N, channels]`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu, softplus
from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.metadata import DecodeIndex, VerifyIndex
from forkpoint.ops.parameters import Out, Records, ScanInputs, ScanParams
from forkpoint.ops.scan.prefill_kernel import scan_sizes, state_tile

CHANNELS = 64  # channels per program: 4 KiB of state with N = 16
AHEAD = tl.constexpr(3)  # tokens whose loads are in flight together


@triton.jit
def _update(state, x, dt, b, rates, dt_bias):
    """Return the state after a token. `rates`, times log2(e), are `[N, channels]`; `b` is `[N]`; others
    `[channels]`."""
    step = softplus(dt + dt_bias)
    kept = tl.exp2(step[None, :] * rates) * state
    # an explicit fma, because the compiler may not choose which product is rounded
    return tl.fma((step * x)[None, :], b[:, None], kept)


@triton.jit
def _row(at, stride, here, inside):
    return tl.load(at + here * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _step_kernel(
    x,
    dt,
    b,
    c,
    z,
    rates,
    dt_bias,
    skip,
    pool,
    out,
    past_x,
    past_dt,
    past_b,
    src,
    dst,
    cu_tokens,
    pending,
    mark,
    mark_dst,
    read,
    write,
    line,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    slot_stride,
    num_rows,
    num_tokens,
    MOST: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    COMPUTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK channels of one row: read the state, fold records, compute tokens, write the state.

    Without `cu_tokens`, rows have one token each and no records to fold. Without COMPUTES there are no tokens."""
    DRAFTS: tl.constexpr = cu_tokens is not None
    pid = tl.program_id(0)
    row, piece = pid // PIECES, pid % PIECES
    channel, value, present, real, in_state, in_slot, rate = state_tile(piece, rates, D, N, BLOCK)
    bias = tl.load(dt_bias + channel, mask=present, other=0.0)
    await_inputs(OVERLAP)  # nothing loaded above was written by the previous launch
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    slot_at = pool + in_slot
    state = tl.load(slot_at + source * slot_stride, mask=in_state & (source >= 0), other=0.0).to(tl.float32)
    first, length = row.to(tl.int64), 1
    if DRAFTS:
        count, position = tl.load(pending + row), tl.load(mark + row)
        marked = slot_at + tl.load(mark_dst + row).to(tl.int64) * slot_stride
        own, shared = tl.load(line + row).to(tl.int64) * MOST, tl.load(read + row).to(tl.int64) * MOST
        for i in tl.range(0, count, num_stages=AHEAD):
            x_row = _row(past_x + channel, D, own + i, present)
            dt_row = _row(past_dt + channel, D, own + i, present)
            b_row = _row(past_b + value, N, shared + i, real)
            state = _update(state, x_row, dt_row, b_row, rate, bias).to(pool.dtype.element_ty).to(tl.float32)
            tl.store(marked, state.to(pool.dtype.element_ty), mask=in_state & (i + 1 == position))
    target_at, in_target = slot_at + target * slot_stride, in_state & (target >= 0)
    if not COMPUTES:
        tl.store(target_at, state.to(pool.dtype.element_ty), mask=in_target)
    else:
        if DRAFTS:
            first = tl.load(cu_tokens + row).to(tl.int64)
            length = tl.load(cu_tokens + row + 1).to(tl.int64) - first
            if length > 1:
                tl.store(target_at, state.to(pool.dtype.element_ty), mask=in_target)
        through = tl.load(skip + channel, mask=present, other=0.0)
        if DRAFTS:
            shared = tl.load(write + row).to(tl.int64) * MOST
            drafting = present & (length > 1)
            tl.debug_barrier()  # the records read above are overwritten below
        for t in tl.range(0, length, num_stages=AHEAD):
            token = first + t
            x_row = _row(x + channel, x_stride, token, present)
            dt_row = _row(dt + channel, dt_stride, token, present)
            b_row, c_row = _row(b + value, b_stride, token, real), _row(c + value, c_stride, token, real)
            z_row = _row(z + channel, z_stride, token, present)
            state = _update(state, x_row, dt_row, b_row, rate, bias)
            y = (tl.sum(state * c_row[:, None], axis=0) + through * x_row) * silu(z_row)
            tl.store(out + token * D + channel, y.to(out.dtype.element_ty), mask=present)
            if DRAFTS:
                state = state.to(pool.dtype.element_ty).to(tl.float32)
                tl.store(past_x + (own + t) * D + channel, x_row.to(past_x.dtype.element_ty), mask=drafting)
                tl.store(past_dt + (own + t) * D + channel, dt_row.to(past_dt.dtype.element_ty), mask=drafting)
                here = real & (piece == 0) & (length > 1)
                tl.store(past_b + (shared + t) * N + value, b_row.to(past_b.dtype.element_ty), mask=here)
        if length == 1:
            tl.store(target_at, state.to(pool.dtype.element_ty), mask=in_target)
        if DRAFTS:
            for token in range(tl.load(cu_tokens + num_rows) + row, num_tokens, num_rows):  # padding
                tl.store(out + token * D + channel, tl.zeros((BLOCK,), out.dtype.element_ty), mask=present)


def scan_decode(inputs: ScanInputs, params: ScanParams, pool: Tensor, index: DecodeIndex, out: Out = None) -> Tensor:
    """Advance each row's state by one token; return the outputs `[B, D]`, in `out` if it is given."""
    return _launch(inputs, params, pool, index, (), out)


def scan_verify(
    inputs: ScanInputs, params: ScanParams, pool: Tensor, index: VerifyIndex, records: Records, out: Out = None
) -> Tensor:
    """Compute the tokens of rows with drafts; return `[T, D]`, in `out` if it is given (`table.Recorded`).

    Tokens of no row get zeros.
    """
    return _launch(inputs, params, pool, index, records, out)


def scan_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """Fold the pending tokens' records into the states, and store the states at the marks."""
    *lines, rates, dt_bias = records
    none = lines[0].new_empty(0, 1)
    _launch(ScanInputs(*[none] * 5), ScanParams(rates, dt_bias, dt_bias), pool, index, lines, none)


def _launch(
    inputs: ScanInputs, params: ScanParams, pool: Tensor, index: DecodeIndex | VerifyIndex, records: Records, out: Out
) -> Tensor:
    """Launch the step kernel and return its output (None: a new one). Without `records`, rows have one token each."""
    assert all(record.is_contiguous() for record in records), "records must be dense"
    out, num_tokens = inputs.x.new_empty(inputs.x.shape) if out is None else out, inputs.x.shape[0]
    sizes, strides = scan_sizes(inputs, params, pool, out, CHANNELS), (value.stride(0) for value in inputs)
    own: tuple[Tensor | None, ...] = (None, None, None, *index.columns, *[None] * 7)
    counts: tuple[int | None, int | None] = (None, None)
    if isinstance(index, VerifyIndex):
        own, counts = (*records, *index.columns, index.line), (len(index), num_tokens)
    given = (*inputs, params.A, params.dt_bias, params.skip, pool, out, *own, *strides, pool.stride(0), *counts)
    sizes |= {"MOST": records[0].shape[1] if records else 0, "COMPUTES": num_tokens > 0}
    sizes |= overlap(pool.device, num_tokens)
    _step_kernel[(len(index) * sizes["PIECES"],)](*given, **sizes, num_warps=1)
    return out
