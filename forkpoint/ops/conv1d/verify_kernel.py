"""The convolution of rows with drafts (VerifyIndex) in Triton. A token has the same bits as in kernel.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.conv1d.kernel import UPDATE_CHANNELS, described, load_rows, outputs, store_output
from forkpoint.ops.launch import await_inputs, overlap, straight
from forkpoint.ops.metadata import VerifyIndex
from forkpoint.ops.parameters import ConvTaps, Records


@triton.jit
def _window(pool, source, line, position, channel, row_stride, seen, D: tl.constexpr, W: tl.constexpr):
    """Return the window after `position` records, `[rows, channels]`, and the places of its rows in a slot."""
    row = tl.arange(0, triton.next_power_of_2(W - 1))[:, None]
    at, shown = position + row, channel[None, :]
    old = tl.load(pool + source + at * row_stride + shown, mask=(at < W - 1) & seen[None, :], other=0.0)
    fresh = (row < W - 1) & (at >= W - 1) & (channel < D)[None, :]
    return tl.where(at < W - 1, old, tl.load(line + (at - (W - 1)) * D + shown, mask=fresh, other=0.0).to(old.dtype))


@triton.jit
def _leave(record, last, newest, present, length, target):
    """Store a token's input in the record, or in the window if it is the row's only token."""
    if length > 1:
        tl.store(record, newest.to(record.dtype.element_ty), mask=present)
    elif target >= 0:
        tl.store(last, newest.to(last.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _verify_kernel(
    x,
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
    weight,
    bias,
    x_stride,
    slot_stride,
    row_stride,
    w_channel,
    w_tap,
    D: tl.constexpr,
    W: tl.constexpr,
    MOST: tl.constexpr,
    SILU: tl.constexpr,
    TAKES: tl.constexpr,
    COMPUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK channels of one row. Without COMPUTES there are no tokens."""
    pid = tl.program_id(0)
    row = pid // PIECES
    channel = (pid % PIECES) * BLOCK + tl.arange(0, BLOCK)
    present = channel < D
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    count, position = tl.load(pending + row), tl.load(mark + row)
    seen = present & (source >= 0)
    line, old = inputs + tl.load(read + row).to(tl.int64) * (MOST * D), source * slot_stride
    window = _window(pool, old, line, count, channel, row_stride, seen, D, W)
    marked = _window(pool, old, line, position, channel, row_stride, seen & (position > 0), D, W)
    behind = tl.arange(0, triton.next_power_of_2(W - 1))[:, None]
    in_slot, inside = behind * row_stride + channel[None, :], (behind < W - 1) & present[None, :]
    length = source * 0
    if COMPUTES:
        first = tl.load(cu_tokens + row).to(tl.int64)
        length = tl.load(cu_tokens + row + 1).to(tl.int64) - first
        OUTS: tl.constexpr = W if TAKES else 1  # rows of the output per token
        if not TAKES:
            taps_at = weight + channel * w_channel
        if not (STRAIGHT or TAKES):
            taps = load_rows(taps_at, w_tap, present, W)
    await_inputs(OVERLAP)  # nothing loaded above was written by the previous launch
    tl.debug_barrier()  # the stores below may overwrite the old window and its records
    if position > 0:
        tl.store(pool + tl.load(mark_dst + row).to(tl.int64) * slot_stride + in_slot, marked, mask=inside)
    if COMPUTES:
        x_at = x + first * x_stride + channel
        write_at = inputs + tl.load(write + row).to(tl.int64) * (MOST * D) + channel
        out_at, last = out + first * (OUTS * D) + channel, pool + target * slot_stride + (W - 2) * row_stride + channel
        if STRAIGHT:  # the compiler for NPUs lacks tuples
            for t in range(length):
                newest = tl.load(x_at + t * x_stride, mask=present, other=0.0)
                total = tl.zeros((BLOCK,), tl.float32)
                for j in tl.static_range(W):
                    value = newest
                    if j < W - 1:
                        at = t + j - (W - 1)  # index among the row's tokens; negative before them
                        near = tl.load(x_at + at * x_stride, mask=present & (at >= 0), other=0.0)
                        past = tl.sum(tl.where(behind == t + j, window.to(tl.float32), 0.0), axis=0)
                        value = tl.where(at >= 0, near, past.to(x.dtype.element_ty))
                    if TAKES:
                        tl.store(out_at + (t * W + j) * D, value, mask=present)
                    else:
                        tap = tl.load(taps_at + j * w_tap, mask=present, other=0.0)
                        total += value.to(tl.float32) * tap.to(tl.float32)
                if not TAKES:
                    store_output(out_at + t * D, total, bias, channel, present, SILU)
                _leave(write_at + t * D, last, newest, present, length, target)
        else:
            window_on = ()
            for j in tl.static_range(W - 1):
                past = tl.sum(tl.where(behind == j, window.to(tl.float32), 0.0), axis=0)
                window_on += (past.to(x.dtype.element_ty),)  # type: ignore[assignment]
            for t in tl.static_range(MOST):
                there = present & (t < length)
                window_on += (tl.load(x_at + t * x_stride, mask=there, other=0.0),)  # type: ignore[assignment]
            for t in tl.static_range(MOST):
                if t < length:
                    if TAKES:
                        for j in tl.static_range(W):
                            tl.store(out_at + (t * W + j) * D, window_on[t + j], mask=present)
                    else:
                        total = tl.zeros((BLOCK,), tl.float32)
                        for j in tl.static_range(W):
                            total += window_on[t + j].to(tl.float32) * taps[j].to(tl.float32)
                        store_output(out_at + t * D, total, bias, channel, present, SILU)
                    _leave(write_at + t * D, last, window_on[t + W - 1], present, length, target)
        for token in range(tl.load(cu_tokens + num_rows) + row, num_tokens, num_rows):  # padding
            nothing = tl.zeros((BLOCK,), out.dtype.element_ty)
            for j in tl.static_range(OUTS):
                tl.store(out + (token * OUTS + j) * D + channel, nothing, mask=present)
    if target >= 0:
        alone = (length == 1).to(tl.int32)  # the window advances by the row's only token
        place = pool + target * slot_stride + in_slot - alone * row_stride
        tl.store(place, window, mask=inside & (behind >= alone))


def conv_verify(x: Tensor, taps: ConvTaps, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    """Convolve the tokens of rows with drafts: `x[T, D]` -> `[T, D]` (`table.ConvVerify`). Padding gets zeros."""
    out = outputs(x, taps, pool)
    _launch(x, taps, pool, out, index, records)
    return out


def window_verify(x: Tensor, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    """Take the windows of rows with drafts: `x[T, D]` -> `[T, W, D]` (`table.WindowVerify`). Padding gets zeros."""
    out = outputs(x, None, pool)
    _launch(x, None, pool, out, index, records)
    return out


def conv_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """Fold the pending tokens' records into the windows, and store the windows at the marks."""
    none = pool.new_empty(0, pool.shape[2])
    _launch(none, None, pool, none, index, records)


def _launch(x: Tensor, taps: ConvTaps | None, pool: Tensor, out: Tensor, index: VerifyIndex, records: Records) -> None:
    given, (lines,) = described(x, taps, pool, UPDATE_CHANNELS), records
    assert lines.is_contiguous(), "records must be dense"
    given |= {"MOST": lines.shape[1], "COMPUTES": x.shape[0] > 0}
    given |= straight(pool.device) | overlap(pool.device, x.shape[0])
    places = (x, pool, out, lines, *index.single_columns, len(index), x.shape[0])
    _verify_kernel[(len(index) * given["PIECES"],)](*places, **given, num_warps=1)
