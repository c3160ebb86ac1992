"""Prefill of the selective scan in Triton. reference.py has the formulas.

Three launches; the first and the third work on all 64-token chunks at once:

1. `_own_kernel` computes, for every chunk except a segment's last, the state that the chunk adds to zero, and the sum
   of its steps.
2. `_join_kernel` joins the chunks of a segment in order, `S' = e^{A sum} S + own`. It leaves the state at each chunk's
   start, and saves states.
3. `_outputs_kernel` computes the outputs, and a segment's last state by the same join.

A state at a multiple of 64 tokens therefore has the same bits wherever a prompt is cut. Segments of one chunk need only
the third launch. States are held transposed, `[N, channels]`, so that a thread holds all values of its channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu, softplus
from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.launch_table import segments, turns
from forkpoint.ops.metadata import TILE, SegmentIndex
from forkpoint.ops.parameters import Out, ScanInputs, ScanParams
from forkpoint.ops.recurrence.solve import CHUNK, chunk_place, first_chunk
from forkpoint.ops.rounding import ceil_div

CHANNELS = 32  # channels per program of a chunk: one per thread
JOINED_CHANNELS, JOINING_WARPS = 32, 8  # per program that joins a segment's chunks
AHEAD = tl.constexpr(4)  # chunks that the joining program loads ahead
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def state_tile(piece, rates, D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's channels and state values, their masks, the mask and the offsets in a slot `[N, BLOCK]`, and
    the decay rates times log2(e)."""
    channel, value = piece * BLOCK + tl.arange(0, BLOCK), tl.arange(0, triton.next_power_of_2(N))
    present, real = channel < D, value < N
    in_state = real[:, None] & present[None, :]
    in_slot = channel[None, :] * N + value[:, None]
    rate = tl.load(rates + in_slot, mask=in_state, other=0.0) * LOG2_E
    return channel, value, present, real, in_state, in_slot, rate


@triton.jit
def _joined(state, own, total, rate):
    """Return the state after a chunk, `[N, channels]`, from the state before it, its own part, and the sum of its
    steps."""
    return tl.fma(tl.exp2(total[None, :] * rate), state, own)


@triton.jit
def _own_kernel(
    x,
    dt,
    b,
    rates,
    dt_bias,
    states,
    totals,
    tiles,
    cu_seqlens,
    x_stride,
    dt_stride,
    b_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK channels of one chunk that is not a segment's last.

    Writes the state that the chunk adds to `states[entry]`, `[D, N]`, and the sum of its steps to `totals[entry]`."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    segment, offset = tl.load(tiles + 2 * (pid // PIECES)), tl.load(tiles + 2 * (pid // PIECES) + 1)
    if segment < 0:
        return
    start, count, entry = chunk_place(cu_seqlens, segment, offset, 0, 1)
    if count <= CHUNK:
        return
    channel, value, present, real, in_state, in_slot, rate = state_tile(pid % PIECES, rates, D, N, BLOCK)
    bias = tl.load(dt_bias + channel, mask=present, other=0.0)
    own, total = tl.zeros(rate.shape, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for t in range(CHUNK):
        here = start.to(tl.int64) + t
        given = tl.load(dt + here * dt_stride + channel, mask=present, other=0.0).to(tl.float32)
        taken = tl.load(x + here * x_stride + channel, mask=present, other=0.0).to(tl.float32)
        into = tl.load(b + here * b_stride + value, mask=real, other=0.0).to(tl.float32)
        step = softplus(given + bias)
        own = tl.fma(tl.exp2(step[None, :] * rate), own, (step * taken)[None, :] * into[:, None])
        total += step
    tl.store(states + entry * (D * N) + in_slot, own, mask=in_state)
    tl.store(totals + entry * D + channel, total, mask=present)


@triton.jit
def _join_kernel(
    rates,
    pool,
    states,
    totals,
    cu_seqlens,
    src,
    save_ptr,
    save_pos,
    save_dst,
    slot_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the chunks of one segment, for BLOCK channels.

    Replaces each chunk's own part by the state at its start, and stores the saves before the segment's end."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    segment = pid // PIECES
    length = tl.load(cu_seqlens + segment + 1) - tl.load(cu_seqlens + segment)
    if length <= CHUNK:
        return
    last = tl.cdiv(length, CHUNK) - 1
    channel, _, present, _, in_state, in_slot, rate = state_tile(pid % PIECES, rates, D, N, BLOCK)
    source = tl.load(src + segment).to(tl.int64)
    state = tl.load(pool + source * slot_stride + in_slot, mask=in_state & (source >= 0), other=0.0).to(tl.float32)
    entry = first_chunk(cu_seqlens, segment).to(tl.int64)
    save, last_save = tl.load(save_ptr + segment), tl.load(save_ptr + segment + 1)
    for e in range(save, last_save + 1):
        # Chunks between two saves. `begin = end` below would be a constant to the compiler.
        begin, end, target = last * 0, last, last * 0 - 1
        if e > save:
            begin = tl.cdiv(tl.load(save_pos + e - 1), CHUNK)
        if e < last_save:
            position = tl.load(save_pos + e)
            if position < length:
                end, target = position // CHUNK, tl.load(save_dst + e)
        for i in tl.range(begin, end, num_stages=AHEAD):
            at = states + (entry + i) * (D * N) + in_slot
            own = tl.load(at, mask=in_state, other=0.0)
            total = tl.load(totals + (entry + i) * D + channel, mask=present, other=0.0)
            tl.store(at, state, mask=in_state)
            state = _joined(state, own, total, rate)
            state = state.to(pool.dtype.element_ty).to(tl.float32)  # round as if the state were stored and resumed here
        if target >= 0:
            kept = pool + target.to(tl.int64) * slot_stride + in_slot
            tl.store(kept, state.to(pool.dtype.element_ty), mask=in_state)
    tl.store(states + (entry + last) * (D * N) + in_slot, state, mask=in_state)


@triton.jit
def _outputs_kernel(
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
    states,
    tiles,
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
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute the outputs of one chunk from the state at its start, for BLOCK channels.

    A segment's last chunk also stores the state at its end."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    segment, offset = tl.load(tiles + 2 * (pid // PIECES)), tl.load(tiles + 2 * (pid // PIECES) + 1)
    if segment < 0:
        return
    start, left, entry = chunk_place(cu_seqlens, segment, offset, 0, 1)
    count = tl.minimum(left, CHUNK)
    channel, value, present, real, in_state, in_slot, rate = state_tile(pid % PIECES, rates, D, N, BLOCK)
    bias = tl.load(dt_bias + channel, mask=present, other=0.0)
    through = tl.load(skip + channel, mask=present, other=0.0)
    # The last chunk may write the slot that its segment starts from, so segments of several chunks read the scratch.
    single, source = offset + left <= CHUNK, tl.load(src + segment).to(tl.int64)
    if single:
        old = pool + source * slot_stride + in_slot
        first = tl.load(old, mask=in_state & (source >= 0), other=0.0).to(tl.float32)
    else:
        first = tl.load(states + entry * (D * N) + in_slot, mask=in_state, other=0.0)
    state, own = first, tl.zeros(rate.shape, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    begin = start.to(tl.int64)
    x_at, dt_at, z_at = x + begin * x_stride + channel, dt + begin * dt_stride + channel, z + begin * z_stride + channel
    b_at, c_at = b + begin * b_stride + value, c + begin * c_stride + value
    next_x, next_dt = tl.load(x_at, mask=present, other=0.0), tl.load(dt_at, mask=present, other=0.0)
    next_b, next_c = tl.load(b_at, mask=real, other=0.0), tl.load(c_at, mask=real, other=0.0)
    next_z = tl.load(z_at, mask=present, other=0.0)
    for t in range(count):
        step, taken = softplus(next_dt.to(tl.float32) + bias), next_x.to(tl.float32)
        into, of, gate = next_b.to(tl.float32), next_c.to(tl.float32), next_z.to(tl.float32)
        coming = tl.minimum(t + 1, count - 1)
        next_x = tl.load(x_at + coming * x_stride, mask=present, other=0.0)
        next_dt = tl.load(dt_at + coming * dt_stride, mask=present, other=0.0)
        next_b = tl.load(b_at + coming * b_stride, mask=real, other=0.0)
        next_c = tl.load(c_at + coming * c_stride, mask=real, other=0.0)
        next_z = tl.load(z_at + coming * z_stride, mask=present, other=0.0)
        decay, new = tl.exp2(step[None, :] * rate), (step * taken)[None, :] * into[:, None]
        state, own = tl.fma(decay, state, new), tl.fma(decay, own, new)
        total += step
        y = (tl.sum(state * of[:, None], axis=0) + through * taken) * silu(gate)
        tl.store(out + (begin + t) * D + channel, y.to(out.dtype.element_ty), mask=present)
    if left <= CHUNK:
        final = _joined(first, own, total, rate).to(pool.dtype.element_ty)
        target, last_save = tl.load(dst + segment), tl.load(save_ptr + segment + 1) - 1
        kept = pool + target.to(tl.int64) * slot_stride + in_slot
        tl.store(kept, final, mask=in_state & (target >= 0))
        if last_save >= tl.load(save_ptr + segment):
            target = tl.load(save_dst + last_save)
            if tl.load(save_pos + last_save) == offset + left:
                kept = pool + target.to(tl.int64) * slot_stride + in_slot
                tl.store(kept, final, mask=in_state & (target >= 0))


def scan_sizes(inputs: ScanInputs, params: ScanParams, pool: Tensor, out: Tensor, channels: int) -> dict[str, Any]:
    """Return the sizes of a launch with `channels` channels per program, under the kernels' names."""
    assert all(value.stride(1) == 1 for value in inputs), "elements of a row lie side by side"
    assert pool[0].is_contiguous() and out.is_contiguous(), "a slot and the result must be dense"
    dim, values = params.A.shape
    return {"D": dim, "N": values, "BLOCK": channels, "PIECES": ceil_div(dim, channels)}


def scan_prefill(inputs: ScanInputs, params: ScanParams, pool: Tensor, index: SegmentIndex, out: Out = None) -> Tensor:
    """Run the scan over segments of `T` tokens, with states in `pool[P, D, N]`; return `[T, D]`, in `out` if given.

    Scratch memory is about `T * D * N / 64` fp32 elements.
    """
    x, dt, b, _, _ = inputs
    tokens, (dim, values) = x.shape[0], params.A.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert index.tiles is not None, "kernels need the index's tiles"
    several = tokens > TILE
    entries = tokens // TILE + len(index) if several else 0
    states = torch.empty(entries, dim, values, dtype=torch.float32, device=x.device)
    totals = torch.empty(entries, dim, dtype=torch.float32, device=x.device)
    sizes = scan_sizes(inputs, params, pool, out, CHANNELS)
    options, strides = overlap(x.device, tokens), [value.stride(0) for value in inputs]
    parts = list(turns(index.tiles, sizes["PIECES"]))
    saves = (index.save_ptr, index.save_pos, index.save_dst)
    if several:
        for tiles in parts:
            own = (x, dt, b, params.A, params.dt_bias, states, totals, tiles, index.cu_seqlens, *strides[:3])
            _own_kernel[(tiles.shape[0] * sizes["PIECES"],)](*own, **sizes, **options, num_warps=1)
        joined = scan_sizes(inputs, params, pool, out, JOINED_CHANNELS)
        for count, (*scratch, starts, src, _, ptr, pos, dst) in segments(index, joined["PIECES"], (states, totals)):
            constants = (params.A, pool, *scratch, starts, src, ptr, pos, dst, pool.stride(0))
            _join_kernel[(count * joined["PIECES"],)](*constants, **joined, **options, num_warps=JOINING_WARPS)
    for tiles in parts:
        given = (*inputs, params.A, params.dt_bias, params.skip, pool, out, states, tiles)
        places = (index.cu_seqlens, index.src, index.dst, *saves, *strides, pool.stride(0))
        _outputs_kernel[(tiles.shape[0] * sizes["PIECES"],)](*given, *places, **sizes, **options, num_warps=1)
    return out
