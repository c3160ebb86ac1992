"""One step of the selective scan in Triton; reference.py has the formulas. The state is held `[N, channels]`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu, softplus
from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.metadata import DecodeIndex
from forkpoint.ops.parameters import Out, ScanInputs, ScanParams
from forkpoint.ops.scan.prefill_kernel import scan_sizes, state_tile

CHANNELS = 64  # of a program: 4 KiB of state for 16 values each


@triton.jit
def scan_update(state, x, dt, b, rates, dt_bias):
    """The state after a token: `state`, `rates` times log2(e) `[N, channels]`, `b` `[N]`, the others `[channels]`."""
    step = softplus(dt + dt_bias)
    kept = tl.exp2(step[None, :] * rates) * state
    return tl.fma((step * x)[None, :], b[:, None], kept)  # which product is rounded may not be left to the compiler


@triton.jit
def scan_answer(state, x, c, z, skip):
    """y of that token."""
    return (tl.sum(state * c[:, None], axis=0) + skip * x) * silu(z)


@triton.jit
def input_row(at, stride, here, inside):
    return tl.load(at + here * stride, mask=inside, other=0.0).to(tl.float32)


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
    pid = tl.program_id(0)
    row = (pid // PIECES).to(tl.int64)
    channel, value, present, real, in_state, in_slot, rate = state_tile(pid % PIECES, rates, D, N, BLOCK_N, BLOCK)
    bias = tl.load(dt_bias + channel, mask=present, other=0.0)
    through = tl.load(skip + channel, mask=present, other=0.0)
    await_inputs(OVERLAP)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    old = pool + source * slot_stride + in_slot
    state = tl.load(old, mask=in_state & (source >= 0), other=0.0).to(tl.float32)
    x_row, dt_row = input_row(x + channel, x_stride, row, present), input_row(dt + channel, dt_stride, row, present)
    b_row, c_row = input_row(b + value, b_stride, row, real), input_row(c + value, c_stride, row, real)
    z_row = input_row(z + channel, z_stride, row, present)
    state = scan_update(state, x_row, dt_row, b_row, rate, bias)
    y = scan_answer(state, x_row, c_row, z_row, through)
    kept = pool + target * slot_stride + in_slot
    tl.store(kept, state.to(pool.dtype.element_ty), mask=in_state & (target >= 0))
    tl.store(out + row * D + channel, y.to(out.dtype.element_ty), mask=present)


def scan_decode(inputs: ScanInputs, params: ScanParams, pool: Tensor, index: DecodeIndex, out: Out = None) -> Tensor:
    """One token per row: inputs of `B` rows -> `[B, D]`, in `out` if given."""
    out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device) if out is None else out
    sizes, num_rows = scan_sizes(inputs, params, pool, out, CHANNELS), inputs.x.shape[0]
    given = (*inputs, params.A, params.dt_bias, params.skip, pool, out, *index.columns)
    strides = (*(value.stride(0) for value in inputs), pool.stride(0))
    sizes |= overlap(inputs.x.device, num_rows)
    _decode_kernel[(num_rows * sizes["PIECES"],)](*given, *strides, **sizes, num_warps=1)
    return out
