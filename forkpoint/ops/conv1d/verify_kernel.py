"""The convolution of rows with drafts in Triton: see VerifyIndex. Each token's arithmetic is that of kernel.py."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu as silu_fp32
from forkpoint.ops.conv1d.kernel import UPDATE_CHANNELS, check_layout, load_rows
from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.metadata import VerifyIndex
from forkpoint.platforms.table import traits_of


@triton.jit
def _input(pool_at, line_at, at, row_stride, present, D: tl.constexpr, W: tl.constexpr):
    """Input `at` of the old window followed by the line's records."""
    old = tl.load(pool_at + at * row_stride, mask=present & (at < W - 1), other=0.0)
    return tl.where(at < W - 1, old, tl.load(line_at + (at - (W - 1)) * D, mask=present & (at >= W - 1), other=0.0))


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _verify_kernel(
    x,
    weight,
    bias,
    pool,
    out,
    inputs,
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
    x_stride,
    slot_stride,
    row_stride,
    w_channel,
    w_tap,
    D: tl.constexpr,
    W: tl.constexpr,
    MOST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    COMPUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK channels of one row. Without COMPUTES there are no tokens."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    row = pid // PIECES
    channel = (pid % PIECES) * BLOCK + tl.arange(0, BLOCK)
    present = channel < D
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    count, position = tl.load(pending + row), tl.load(mark + row)
    pool_at, seen = pool + source * slot_stride + channel, present & (source >= 0)
    line_at = inputs + tl.load(read + row).to(tl.int64) * (MOST * D) + channel
    window = ()
    for j in tl.static_range(W - 1):
        window += (_input(pool_at, line_at, count + j, row_stride, seen, D, W),)  # type: ignore[assignment]
    if position > 0:
        marked = ()
        for j in tl.static_range(W - 1):
            marked += (_input(pool_at, line_at, position + j, row_stride, seen, D, W),)  # type: ignore[assignment]
        _store(pool + tl.load(mark_dst + row).to(tl.int64) * slot_stride + channel, marked, row_stride, present, W)
    kept = present & (target >= 0)
    if not COMPUTES:
        _store(pool + target * slot_stride + channel, window, row_stride, kept, W)
    else:
        first = tl.load(cu_tokens + row).to(tl.int64)
        length = tl.load(cu_tokens + row + 1).to(tl.int64) - first
        if length > 1:
            _store(pool + target * slot_stride + channel, window, row_stride, kept, W)
        taps = load_rows(weight + channel * w_channel, w_tap, present, W)
        write_at = inputs + tl.load(write + row).to(tl.int64) * (MOST * D) + channel
        shift = tl.zeros((BLOCK,), tl.float32)
        if HAS_BIAS:
            shift = tl.load(bias + channel, mask=present, other=0.0).to(tl.float32)
        tl.debug_barrier()  # the line written may be the one read above
        for t in range(length):
            newest = tl.load(x + (first + t) * x_stride + channel, mask=present, other=0.0)
            total = tl.zeros((BLOCK,), tl.float32)
            for j in tl.static_range(W - 1):
                total += window[j].to(x.dtype.element_ty).to(tl.float32) * taps[j].to(tl.float32)
            total += newest.to(tl.float32) * taps[W - 1].to(tl.float32)
            if HAS_BIAS:
                total += shift
            if SILU:
                total = silu_fp32(total)
            tl.store(out + (first + t) * D + channel, total.to(out.dtype.element_ty), mask=present)
            if length > 1:
                tl.store(write_at + t * D, newest.to(inputs.dtype.element_ty), mask=present)
            window = window[1:]
            window += (newest.to(pool.dtype.element_ty),)  # type: ignore[assignment]
        if length == 1:
            _store(pool + target * slot_stride + channel, window, row_stride, kept, W)
        for token in range(tl.load(cu_tokens + num_rows) + row, num_tokens, num_rows):  # padding's
            nothing = tl.zeros((BLOCK,), out.dtype.element_ty)
            tl.store(out + token * D + channel, nothing, mask=present)


@triton.jit
def _window(pool, source, line, position, channel, row_stride, seen, D: tl.constexpr, W: tl.constexpr):
    """The window after `position` records, `[rows, channels]`, and where its rows lie in a slot."""
    row = tl.arange(0, triton.next_power_of_2(W - 1))[:, None]
    at, shown = position + row, channel[None, :]
    old = tl.load(pool + source + at * row_stride + shown, mask=(at < W - 1) & seen[None, :], other=0.0)
    fresh = (row < W - 1) & (at >= W - 1) & (channel < D)[None, :]
    return tl.where(at < W - 1, old, tl.load(line + (at - (W - 1)) * D + shown, mask=fresh, other=0.0).to(old.dtype))


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _straight_kernel(
    x,
    weight,
    bias,
    pool,
    out,
    inputs,
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
    x_stride,
    slot_stride,
    row_stride,
    w_channel,
    w_tap,
    D: tl.constexpr,
    W: tl.constexpr,
    MOST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    COMPUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `_verify_kernel`, for the compiler for NPUs, which knows no tuples: inputs are read where they are needed."""
    pid = tl.program_id(0)
    row = pid // PIECES
    channel = (pid % PIECES) * BLOCK + tl.arange(0, BLOCK)
    present = channel < D
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    count, position = tl.load(pending + row), tl.load(mark + row)
    pool_at, seen = pool + source * slot_stride + channel, present & (source >= 0)
    line_at = inputs + tl.load(read + row).to(tl.int64) * (MOST * D) + channel
    first, length = source * 0, source * 0
    if COMPUTES:
        first = tl.load(cu_tokens + row).to(tl.int64)
        length = tl.load(cu_tokens + row + 1).to(tl.int64) - first
        for t in range(length):
            total = tl.zeros((BLOCK,), tl.float32)
            for j in tl.static_range(W):
                value = tl.zeros((BLOCK,), tl.float32)
                at = t + j - (W - 1)  # of the row's tokens
                if at >= 0:
                    value = tl.load(x + (first + at) * x_stride + channel, mask=present, other=0.0).to(tl.float32)
                else:
                    old = _input(pool_at, line_at, count + t + j, row_stride, seen, D, W)
                    value = old.to(x.dtype.element_ty).to(tl.float32)
                tap = tl.load(weight + channel * w_channel + j * w_tap, mask=present, other=0.0)
                total += value * tap.to(tl.float32)
            if HAS_BIAS:
                total += tl.load(bias + channel, mask=present, other=0.0).to(tl.float32)
            if SILU:
                total = silu_fp32(total)
            tl.store(out + (first + t) * D + channel, total.to(out.dtype.element_ty), mask=present)
        for token in range(tl.load(cu_tokens + num_rows) + row, num_tokens, num_rows):  # padding's
            nothing = tl.zeros((BLOCK,), out.dtype.element_ty)
            tl.store(out + token * D + channel, nothing, mask=present)
    # What is stored may lie where the old window and its records were: both new ones are read before.
    line, old = inputs + tl.load(read + row).to(tl.int64) * (MOST * D), source * slot_stride
    alone = (length == 1).to(tl.int32)  # the window goes on by the row's only token
    window = _window(pool, old, line, count + alone, channel, row_stride, seen, D, W)
    marked = _window(pool, old, line, position, channel, row_stride, seen, D, W)
    behind = tl.arange(0, triton.next_power_of_2(W - 1))[:, None]
    in_slot, inside = behind * row_stride + channel[None, :], (behind < W - 1) & present[None, :]
    if length > 1:
        write_at = inputs + tl.load(write + row).to(tl.int64) * (MOST * D) + channel
        for t in range(length):
            newest = tl.load(x + (first + t) * x_stride + channel, mask=present, other=0.0)
            tl.store(write_at + t * D, newest.to(inputs.dtype.element_ty), mask=present)
    if position > 0:
        tl.store(pool + tl.load(mark_dst + row).to(tl.int64) * slot_stride + in_slot, marked, mask=inside)
    if target >= 0:
        tl.store(pool + target * slot_stride + in_slot, window, mask=inside & (behind < W - 1 - alone))
        if length == 1:
            newest = tl.load(x + first * x_stride + channel, mask=present, other=0.0)
            last = pool + target * slot_stride + (W - 2) * row_stride + channel
            tl.store(last, newest.to(pool.dtype.element_ty), mask=present)


@triton.jit
def _store(place, window, row_stride, mask, W: tl.constexpr):
    for j in tl.static_range(W - 1):
        tl.store(place + j * row_stride, window[j], mask=mask)


def conv_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    index: VerifyIndex,
    records: Sequence[Tensor],
    silu: bool,
) -> Tensor:
    """See `table.ConvVerify`; what tokens of no row get is zero."""
    check_layout(x, pool)
    out = x.new_empty(x.shape)
    _launch(x, weight, bias, pool, out, index, records, silu)
    return out


def conv_fold(pool: Tensor, index: VerifyIndex, records: Sequence[Tensor]) -> None:
    """The windows after the pending tokens, and at the marks."""
    (lines,) = records
    none = pool.new_empty(0, pool.shape[2])
    _launch(none, none.new_empty(pool.shape[2], pool.shape[1] + 1), None, pool, none, index, (lines,), False)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    out: Tensor,
    index: VerifyIndex,
    records: Sequence[Tensor],
    silu: bool,
) -> None:
    (dim, width), (lines,) = weight.shape, records
    assert lines.is_contiguous(), "records must be dense"
    pieces = triton.cdiv(dim, UPDATE_CHANNELS)
    kernel = _verify_kernel if traits_of(pool.device).masks_gathers else _straight_kernel
    kernel[(len(index) * pieces,)](
        x,
        weight,
        x if bias is None else bias,
        pool,
        out,
        lines,
        *index.single_columns,
        len(index),
        x.shape[0],
        x.stride(0),
        pool.stride(0),
        pool.stride(1),
        *weight.stride(),
        D=dim,
        W=width,
        MOST=lines.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        COMPUTES=x.shape[0] > 0,
        BLOCK=UPDATE_CHANNELS,
        PIECES=pieces,
        **overlap(pool.device, x.shape[0]),
        num_warps=1,
    )
