"""The selective scan in Triton; reference.py has the formulas.

The state is held transposed, `[N, channels]`: a thread has all values of its channels, and their sum stays within it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu, softplus
from forkpoint.ops.launch import await_inputs, overlap, straight
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex
from forkpoint.ops.parameters import ScanInputs, ScanParams

CHANNELS = 8  # of a program that takes a prompt: as many programs as keep the device busy
DECODE_CHANNELS = 64  # and of one that takes a step: 4 KiB of state for 16 values each
TOKENS = 4  # whose inputs are under way together
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _token(state, x, dt, b, c, z, rates, dt_bias, skip):
    """(y, the new state) of one token: `state`, `rates` times log2(e) `[N, channels]`, `b`, `c` `[N]`, the others
    `[channels]`."""
    step = softplus(dt + dt_bias)
    state = tl.exp2(step[None, :] * rates) * state + (step * x)[None, :] * b[:, None]
    y = tl.sum(state * c[:, None], axis=0) + skip * x
    return y * silu(z), state


@triton.jit
def _slot_at(pool, slot, slot_stride, value, channel, N: tl.constexpr):
    return pool + slot.to(tl.int64) * slot_stride + channel[None, :] * N + value[:, None]


@triton.jit
def _row(at, stride, here, inside):
    return tl.load(at + here * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _prefill_kernel(
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
    cu_seqlens,
    src,
    dst,
    save_ptr,
    save_pos,
    save_dst,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    slot_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    AHEAD: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK channels through all tokens of one segment."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    segment = pid // PIECES
    channel, value = (pid % PIECES) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    present, real = channel < D, value < N
    in_state = real[:, None] & present[None, :]
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    rate = tl.load(rates + channel[None, :] * N + value[:, None], mask=in_state, other=0.0) * LOG2_E
    bias = tl.load(dt_bias + channel, mask=present, other=0.0)
    through = tl.load(skip + channel, mask=present, other=0.0)
    state = tl.zeros((BLOCK_N, BLOCK), tl.float32)
    source = tl.load(src + segment)
    if source >= 0:
        old = _slot_at(pool, source, slot_stride, value, channel, N)
        state = tl.load(old, mask=in_state, other=0.0).to(tl.float32)
    first = start.to(tl.int64)
    save, last_save = tl.load(save_ptr + segment), tl.load(save_ptr + segment + 1)
    begin = length * 0
    for e in range(save, last_save + 1):
        # Up to the next state to store.
        end, target = length, tl.load(dst + segment)
        if e < last_save:
            end, target = tl.load(save_pos + e), tl.load(save_dst + e)
        if STRAIGHT:  # the compiler for NPUs knows no tuples
            for at in range(begin, end):
                here = first + at
                y, state = _token(
                    state,
                    _row(x + channel, x_stride, here, present),
                    _row(dt + channel, dt_stride, here, present),
                    _row(b + value, b_stride, here, real),
                    _row(c + value, c_stride, here, real),
                    _row(z + channel, z_stride, here, present),
                    rate,
                    bias,
                    through,
                )
                tl.store(out + here * D + channel, y.to(out.dtype.element_ty), mask=present)
        else:
            for at in range(begin, end, AHEAD):
                xs, dts, bs, cs, zs = (), (), (), (), ()
                for t in tl.static_range(AHEAD):
                    here, inside = first + at + t, at + t < end
                    xs += (_row(x + channel, x_stride, here, present & inside),)  # type: ignore[assignment]
                    dts += (_row(dt + channel, dt_stride, here, present & inside),)  # type: ignore[assignment]
                    bs += (_row(b + value, b_stride, here, real & inside),)  # type: ignore[assignment]
                    cs += (_row(c + value, c_stride, here, real & inside),)  # type: ignore[assignment]
                    zs += (_row(z + channel, z_stride, here, present & inside),)  # type: ignore[assignment]
                for t in tl.static_range(AHEAD):
                    y, new = _token(state, xs[t], dts[t], bs[t], cs[t], zs[t], rate, bias, through)
                    inside = at + t < end
                    state = tl.where(inside, new, state)
                    place = out + (first + at + t) * D + channel
                    tl.store(place, y.to(out.dtype.element_ty), mask=present & inside)
        if target >= 0:
            kept = _slot_at(pool, target, slot_stride, value, channel, N)
            tl.store(kept, state.to(pool.dtype.element_ty), mask=in_state)
        begin = end


@triton.jit
def _decode_kernel(
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
    src,
    dst,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    slot_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK channels of one row."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // PIECES).to(tl.int64)
    channel, value = (pid % PIECES) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    present, real = channel < D, value < N
    in_state = real[:, None] & present[None, :]
    source, target = tl.load(src + row), tl.load(dst + row)
    old = _slot_at(pool, source, slot_stride, value, channel, N)
    state = tl.load(old, mask=in_state & (source >= 0), other=0.0).to(tl.float32)
    y, state = _token(
        state,
        _row(x + channel, x_stride, row, present),
        _row(dt + channel, dt_stride, row, present),
        _row(b + value, b_stride, row, real),
        _row(c + value, c_stride, row, real),
        _row(z + channel, z_stride, row, present),
        tl.load(rates + channel[None, :] * N + value[:, None], mask=in_state, other=0.0) * LOG2_E,
        tl.load(dt_bias + channel, mask=present, other=0.0),
        tl.load(skip + channel, mask=present, other=0.0),
    )
    tl.store(out + row * D + channel, y.to(out.dtype.element_ty), mask=present)
    kept = _slot_at(pool, target, slot_stride, value, channel, N)
    tl.store(kept, state.to(pool.dtype.element_ty), mask=in_state & (target >= 0))


def _operands(
    inputs: ScanInputs, params: ScanParams, pool: Tensor, out: Tensor, channels: int
) -> tuple[list[Any], dict[str, int]]:
    """(tensors up to `out`, sizes) of a launch whose programs take so many channels."""
    assert all(value.stride(1) == 1 for value in inputs), "elements of a row lie side by side"
    assert pool[0].is_contiguous() and out.is_contiguous(), "a slot and the result must be dense"
    dim, values = params.A.shape
    pieces = triton.cdiv(dim, channels)
    sizes = {"D": dim, "N": values, "BLOCK_N": triton.next_power_of_2(values), "BLOCK": channels, "PIECES": pieces}
    return [*inputs, params.A, params.dt_bias, params.skip, pool, out], sizes


def scan_prefill(
    inputs: ScanInputs, params: ScanParams, pool: Tensor, index: SegmentIndex, out: Tensor | None = None
) -> Tensor:
    """The scan over segments: inputs of `T` tokens -> `[T, D]`, in `out` if given; `pool[P, D, N]` as `index` says."""
    out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device) if out is None else out
    operands, sizes = _operands(inputs, params, pool, out, CHANNELS)
    _prefill_kernel[(len(index) * sizes["PIECES"],)](
        *operands,
        *index.columns,
        *(value.stride(0) for value in inputs),
        pool.stride(0),
        **sizes,
        AHEAD=TOKENS,
        **straight(inputs.x.device),
        **overlap(inputs.x.device, inputs.x.shape[0]),
        num_warps=1,
    )
    return out


def scan_decode(
    inputs: ScanInputs, params: ScanParams, pool: Tensor, index: DecodeIndex, out: Tensor | None = None
) -> Tensor:
    """One token per row: inputs of `B` rows -> `[B, D]`, in `out` if given."""
    out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device) if out is None else out
    operands, sizes = _operands(inputs, params, pool, out, DECODE_CHANNELS)
    _decode_kernel[(inputs.x.shape[0] * sizes["PIECES"],)](
        *operands,
        index.src,
        index.dst,
        *(value.stride(0) for value in inputs),
        pool.stride(0),
        **sizes,
        **overlap(inputs.x.device, inputs.x.shape[0]),
        num_warps=1,
    )
    return out
