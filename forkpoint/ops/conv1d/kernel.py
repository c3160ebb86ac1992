"""Causal depthwise convolution in Triton. Sums are fp32, with one rounding at the end.

A prefill program computes one tile of tokens of a block of channels, token by token, with the last inputs in registers.
An update program computes one row's token for a block of channels. With TAKES, a kernel stores each token's last W
inputs instead of their convolution (`table.TakeWindows`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu as silu_fp32
from forkpoint.ops.launch import await_inputs, overlap, straight
from forkpoint.ops.launch_table import turns
from forkpoint.ops.metadata import TILE as TOKEN_TILE
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex
from forkpoint.ops.parameters import ConvTaps
from forkpoint.ops.rounding import ceil_div

TILE = tl.constexpr(TOKEN_TILE)
CHANNELS = 256  # channels per prefill program
FEW_TOKENS = 512  # tokens of a prefill; up to here programs compute SHORT tokens, so that there are enough programs
SHORT, LONG = 8, 16  # tokens per prefill program, or more if the window is wider
UPDATE_CHANNELS = 256  # channels per update program


@triton.jit
def _store_window(
    x, pool, source, target, position, x_stride, slot_stride, row_stride, channel, present, W: tl.constexpr
):
    """Store the window after `position` tokens of a segment in slot `target`; its start is from slot `source`.

    Rows ascend, so `target` may equal `source`. A `source` of -1 has zeros.
    """
    for j in tl.static_range(W - 1):
        back = position - (W - 1) + j
        place = pool + target.to(tl.int64) * slot_stride + j * row_stride + channel
        if back >= 0:
            value = tl.load(x + back.to(tl.int64) * x_stride + channel, mask=present, other=0.0)
            tl.store(place, value.to(pool.dtype.element_ty), mask=present)
        elif source >= 0:
            old = pool + source.to(tl.int64) * slot_stride + (back + W - 1) * row_stride + channel
            tl.store(place, tl.load(old, mask=present, other=0.0), mask=present)
        else:
            tl.store(place, tl.zeros_like(channel).to(pool.dtype.element_ty), mask=present)


@triton.jit
def load_rows(first, stride, mask, COUNT: tl.constexpr):
    """Load COUNT blocks, at `first`, `first + stride`, .., as a tuple."""
    rows = ()
    for j in tl.static_range(COUNT):
        rows += (tl.load(first + j * stride, mask=mask, other=0.0),)  # type: ignore[assignment]
    return rows


@triton.jit
def _input_at(at, x, old, x_stride, row_stride, source, present, W: tl.constexpr):
    """Load input `at` of a segment in fp32; a negative one from the window in slot `source`, or zeros."""
    value = tl.zeros(present.shape, x.dtype.element_ty)
    if at >= 0:
        value = tl.load(x + at.to(tl.int64) * x_stride, mask=present, other=0.0)
    elif source >= 0:
        value = tl.load(old + (at + W - 1) * row_stride, mask=present, other=0.0).to(x.dtype.element_ty)
    return value.to(tl.float32)


@triton.jit
def store_output(out, total, bias, channel, present, SILU: tl.constexpr):
    """Store a token's output: the sum, with bias and SiLU."""
    if bias is not None:
        total += tl.load(bias + channel, mask=present, other=0.0).to(tl.float32)
    if SILU:
        total = silu_fp32(total)
    tl.store(out, total.to(out.dtype.element_ty), mask=present)


@triton.jit
def _prefill_kernel(
    x,
    pool,
    out,
    tiles,
    cu_seqlens,
    src,
    dst,
    save_ptr,
    save_pos,
    save_dst,
    weight,
    bias,
    x_stride,
    slot_stride,
    row_stride,
    w_channel,
    w_tap,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    TAKES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute TOKENS tokens of a tile one after another, for BLOCK channels.

    Only the program of a segment's first tokens reads the old window and stores new windows. A window is therefore at
    most TOKENS wide: the next program would otherwise need rows of the old window too, and may find them overwritten.
    """
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    PARTS: tl.constexpr = TILE // TOKENS
    tile = pid // (PIECES * PARTS)
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    offset += (pid // PIECES) % PARTS * TOKENS
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    source = tl.load(src + segment)
    channel = (pid % PIECES) * BLOCK + tl.arange(0, BLOCK)
    present = channel < D
    first = x + start.to(tl.int64) * x_stride
    here = first + offset.to(tl.int64) * x_stride + channel
    if not STRAIGHT:
        window = ()
        if not TAKES:
            taps = load_rows(weight + channel * w_channel, w_tap, present, W)
        for j in tl.static_range(W - 1):
            # The inputs of a later part all lie inside the segment, because a window is at most TOKENS wide.
            value = tl.zeros((BLOCK,), x.dtype.element_ty)
            if offset > 0:
                value = tl.load(here - (W - 1 - j) * x_stride, mask=present & (offset < length), other=0.0)
            elif source >= 0:
                old = pool + source.to(tl.int64) * slot_stride + j * row_stride + channel
                value = tl.load(old, mask=present, other=0.0).to(x.dtype.element_ty)
            window += (value.to(tl.float32),)  # type: ignore[assignment]
    shift = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, mask=present, other=0.0).to(tl.float32)
    OUTS: tl.constexpr = W if TAKES else 1  # rows of the output per token
    place = out + (start + offset).to(tl.int64) * (OUTS * D) + channel
    if STRAIGHT:  # the compiler for NPUs lacks tuples
        old = pool + source.to(tl.int64) * slot_stride + channel
        for t in range(tl.minimum(length - offset, TOKENS)):
            total = tl.zeros((BLOCK,), tl.float32)
            for j in tl.static_range(W):
                at = offset + t + j - (W - 1)
                value = _input_at(at, first + channel, old, x_stride, row_stride, source, present, W)
                if TAKES:
                    tl.store(place + (t * W + j) * D, value.to(out.dtype.element_ty), mask=present)
                else:
                    tap = tl.load(weight + channel * w_channel + j * w_tap, mask=present, other=0.0)
                    total += value * tap.to(tl.float32)
            if not TAKES:
                store_output(place + t * D, total + shift, None, channel, present, SILU)
    else:
        for t in tl.static_range(TOKENS):
            inside = present & (offset + t < length)
            newest = tl.load(here + t * x_stride, mask=inside, other=0.0).to(tl.float32)
            window += (newest,)  # type: ignore[assignment]
            if TAKES:
                for j in tl.static_range(W):
                    tl.store(place + (t * W + j) * D, window[j].to(out.dtype.element_ty), mask=inside)
            else:
                total = window[0] * taps[0].to(tl.float32)  # type: ignore[misc]
                for j in tl.static_range(1, W):
                    total += window[j] * taps[j].to(tl.float32)
            window = window[1:]
            if not TAKES:
                total += shift
                if SILU:
                    total = silu_fp32(total)
                tl.store(place + t * D, total.to(out.dtype.element_ty), mask=inside)
    if offset == 0:
        # The segment may write the slot that it reads. Every warp has read the old window by now.
        tl.debug_barrier()
        for e in range(tl.load(save_ptr + segment), tl.load(save_ptr + segment + 1)):
            target, position = tl.load(save_dst + e), tl.load(save_pos + e)
            if target >= 0:
                _store_window(
                    first, pool, source, target, position, x_stride, slot_stride, row_stride, channel, present, W
                )
        target = tl.load(dst + segment)
        if target >= 0:
            _store_window(first, pool, source, target, length, x_stride, slot_stride, row_stride, channel, present, W)


@triton.jit
def _update_kernel(
    x,
    pool,
    out,
    src,
    dst,
    weight,
    bias,
    x_stride,
    slot_stride,
    row_stride,
    w_channel,
    w_tap,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    TAKES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pid = tl.program_id(0)
    row = (pid // PIECES).to(tl.int64)
    channel = (pid % PIECES) * BLOCK + tl.arange(0, BLOCK)
    present = channel < D
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    # Without branches, all loads are in flight together.
    seen, kept = present & (source >= 0), present & (target >= 0)
    old, new = pool + source * slot_stride + channel, pool + target * slot_stride + channel
    if not TAKES:
        taps_at = weight + channel * w_channel
    if not STRAIGHT:
        if not TAKES:
            taps = load_rows(taps_at, w_tap, present, W)
        window = load_rows(old, row_stride, seen, W - 1)
    await_inputs(OVERLAP)  # the previous launch writes only x
    newest = tl.load(x + row * x_stride + channel, mask=present, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(W - 1):
        value = tl.load(old + j * row_stride, mask=seen, other=0.0) if STRAIGHT else window[j]
        if TAKES:
            tl.store(out + (row * W + j) * D + channel, value.to(out.dtype.element_ty), mask=present)
        else:
            tap = tl.load(taps_at + j * w_tap, mask=present, other=0.0) if STRAIGHT else taps[j]
            total += value.to(x.dtype.element_ty).to(tl.float32) * tap.to(tl.float32)
        if j > 0:
            # This program has read row j - 1 already.
            tl.store(new + (j - 1) * row_stride, value, mask=kept)
    tl.store(new + (W - 2) * row_stride, newest.to(pool.dtype.element_ty), mask=kept)
    if TAKES:
        tl.store(out + (row * W + W - 1) * D + channel, newest, mask=present)
    else:
        tap = tl.load(taps_at + (W - 1) * w_tap, mask=present, other=0.0) if STRAIGHT else taps[W - 1]
        total += newest.to(tl.float32) * tap.to(tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=present, other=0.0).to(tl.float32)
        if SILU:
            total = silu_fp32(total)
        tl.store(out + row * D + channel, total.to(out.dtype.element_ty), mask=present)


def check_layout(x: Tensor, pool: Tensor) -> None:
    assert x.stride(1) == 1 and pool.stride(2) == 1, "channels must be dense"


def described(x: Tensor, taps: ConvTaps | None, pool: Tensor, block: int) -> dict[str, Any]:
    """Return taps, strides and sizes of a launch with `block` channels per program, under the kernels' names.

    Without taps, the kernels take windows."""
    check_layout(x, pool)
    given: dict[str, Any] = dict.fromkeys(("weight", "bias", "w_channel", "w_tap"))
    given |= {"SILU": False, "TAKES": taps is None}
    if taps is not None:
        w_channel, w_tap = taps.weight.stride()
        given |= {"weight": taps.weight, "bias": taps.bias, "w_channel": w_channel, "w_tap": w_tap, "SILU": taps.silu}
    strides = {"x_stride": x.stride(0), "slot_stride": pool.stride(0), "row_stride": pool.stride(1)}
    dim, width = pool.shape[2], pool.shape[1] + 1
    return {**given, **strides, "D": dim, "W": width, "BLOCK": block, "PIECES": ceil_div(dim, block)}


def conv_prefill(x: Tensor, taps: ConvTaps, pool: Tensor, index: SegmentIndex) -> Tensor:
    """Convolve the segments' raw inputs `x[T, D]`, end to end, with windows in `pool[P, W-1, D]`; return `[T, D]`.

    The window after each segment goes to `index.dst`, the one after `save_pos` tokens to `save_dst`.
    """
    return _prefill(x, taps, pool, index)


def window_prefill(x: Tensor, pool: Tensor, index: SegmentIndex) -> Tensor:
    """Take the windows of the segments' inputs: `x[T, D]` -> `[T, W, D]` (`table.TakeWindows`)."""
    return _prefill(x, None, pool, index)


def outputs(x: Tensor, taps: ConvTaps | None, pool: Tensor) -> Tensor:
    """Allocate the outputs of tokens `x[T, D]`, or their windows `[T, W, D]` without taps."""
    return x.new_empty(x.shape if taps is not None else (len(x), pool.shape[1] + 1, x.shape[1]))


def _prefill(x: Tensor, taps: ConvTaps | None, pool: Tensor, index: SegmentIndex) -> Tensor:
    given, out = described(x, taps, pool, CHANNELS), outputs(x, taps, pool)
    assert index.tiles is not None, "kernels need the index's tiles"
    tokens = _tokens_per_program(x.shape[0], given["W"] - 1)
    each, form = given["PIECES"] * (TOKEN_TILE // tokens), straight(x.device) | overlap(x.device, x.shape[0])
    for tiles in turns(index.tiles, each):
        places = (x, pool, out, tiles, *index.columns)
        _prefill_kernel[(tiles.shape[0] * each,)](*places, **given, TOKENS=tokens, **form, num_warps=2)
    return out


def _tokens_per_program(num_tokens: int, window: int) -> int:
    """Return the tokens of one prefill program: a divisor of a tile, and at least as many as a window has inputs."""
    assert window <= TOKEN_TILE, f"windows have at most {TOKEN_TILE} inputs"
    tokens = SHORT if num_tokens <= FEW_TOKENS else LONG
    while tokens < window:
        tokens *= 2
    return tokens


def conv_update(x: Tensor, taps: ConvTaps, pool: Tensor, index: DecodeIndex) -> Tensor:
    """Convolve one token per row: `x[B, D]` -> `[B, D]`. Reads the windows `index.src`, writes `index.dst`."""
    return _update(x, taps, pool, index)


def window_update(x: Tensor, pool: Tensor, index: DecodeIndex) -> Tensor:
    """Take the windows of one token per row: `x[B, D]` -> `[B, W, D]` (`table.TakeWindows`)."""
    return _update(x, None, pool, index)


def _update(x: Tensor, taps: ConvTaps | None, pool: Tensor, index: DecodeIndex) -> Tensor:
    given, out = described(x, taps, pool, UPDATE_CHANNELS), outputs(x, taps, pool)
    form = straight(x.device) | overlap(x.device, x.shape[0])
    _update_kernel[(x.shape[0] * given["PIECES"],)](x, pool, out, *index.columns, **given, **form, num_warps=1)
    return out
