"""Chunked recurrences in Triton. reference.py has the formulas.

Two kernels compute a prefill:

1. `_chunk_kernel` works on all 64-token chunks at once: gates, the chunk's scores, and for the delta rule the norms of
   q and k and the inverse of the chunk's triangular system.
2. `_scan_kernel` walks each segment's chunks in order, with the fp32 state in registers. It stores the state to slots
   where the index says so. In the transposed (TURN) form, each product's left operand is the previous result and stays
   in registers. A recorded step launches both forms, and one of them does nothing.

Products have bfloat16 operands for bfloat16 inputs and fp32 operands otherwise. Every sum is fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, capped_registers, overlap
from forkpoint.ops.launch_table import launch_table, segments, turns
from forkpoint.ops.metadata import TILE, SegmentIndex
from forkpoint.ops.parameters import Out, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.gates import L2_EPS, decay, described, head_tile, result, sizes, weight
from forkpoint.ops.recurrence.key_kernel import key_prefill
from forkpoint.ops.recurrence.solve import CHUNK, chunk_place, first_chunk, unit_lower_inverse
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.platforms.table import traits_of

# Values per token that the first launch leaves for the second: the factors of `S k`, of `S q`, of k in the state's
# update, and of the state itself since the chunk's start.
GAINS = tl.constexpr(4)
WIDE_KEYS = 128  # key dims; with more, registers suffice only for NARROW value rows
MIN_WIDTH = 64  # keys in a tile at least; value rows per program when there are many programs
NARROW = 32  # value rows per program when there are few programs
CHUNK_REGISTERS = 168  # per thread, so that three programs share a processor


@triton.jit
def _chunk_kernel(
    mixed,
    a,
    b,
    a_log,
    dt_bias,
    tiles,
    cu_seqlens,
    systems,
    scores,
    gains,
    mixed_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DELTA: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one chunk of one value head. Rows and columns past a segment's end are zeros.

    `k_scale` multiplies k: its inverse norm with the delta rule, beta without it.
    """
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    tile, head = pid // HV, pid % HV
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    start, count, entry = chunk_place(cu_seqlens, segment, offset, head, HV)
    row, col = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token = start.to(tl.int64) + row
    present = row < count
    raw_a = tl.load(a + token * a_stride + head, mask=present, other=0.0)
    if DELTA:
        raw_b = tl.load(b + token * b_stride + head, mask=present, other=0.0)
    inside = present[:, None] & (col < K)[None, :]
    q_at = mixed + token[:, None] * mixed_stride + (head // (HV // H) * K + col)[None, :]
    k = tl.load(q_at + H * K, mask=inside, other=0.0)
    q = tl.load(q_at, mask=inside, other=0.0)
    g, step = decay(raw_a, tl.load(a_log + head), tl.load(dt_bias + head), LOW, HIGH)
    if DELTA:
        beta = weight(raw_b, DOUBLE_BETA)
    g = tl.where(present, g, 0.0)
    if DELTA:
        beta = tl.where(present, beta, 0.0)
    total = tl.cumsum(g, axis=0)
    last = tl.sum(tl.where(row == CHUNK - 1, total, 0.0), axis=0)
    if DELTA:
        wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
        k_scale = tl.rsqrt(tl.sum(wide_k * wide_k, axis=1) + L2_EPS)
        q_scale = tl.rsqrt(tl.sum(wide_q * wide_q, axis=1) + L2_EPS) * scale
    else:
        k_scale, q_scale = tl.where(present, step, 0.0), tl.where(present, 1.0, 0.0)
    grown = tl.exp(total)
    gain = gains + entry * (GAINS * CHUNK) + row
    tl.store(gain, grown * k_scale)
    tl.store(gain + CHUNK, grown * q_scale)
    tl.store(gain + 2 * CHUNK, tl.exp(last - total) * k_scale)
    tl.store(gain + 3 * CHUNK, grown)
    square = entry * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    steps = tl.where(row[:, None] >= row[None, :], total[:, None] - total[None, :], float("-inf"))
    decays = tl.exp(steps) * k_scale[None, :]
    k_t = tl.trans(k)
    if DELTA:
        system = tl.dot(k, k_t, input_precision="ieee") * decays * (beta * k_scale)[:, None]
    score = tl.dot(q, k_t, input_precision="ieee") * decays * q_scale[:, None]
    tl.store(scores + square, score.to(scores.dtype.element_ty))
    if DELTA:
        kind: tl.constexpr = systems.dtype.element_ty
        inverse = unit_lower_inverse(tl.where(row[:, None] > row[None, :], system, 0.0), kind != tl.float32)
        tl.store(systems + square, (inverse * beta[None, :]).to(kind))


@triton.jit
def _turned(x, TURN: tl.constexpr):
    return tl.trans(x) if TURN else x


@triton.jit
def _product(left, right, TURN: tl.constexpr):
    """Return `left @ right`. With TURN, `right` and the result are held transposed."""
    if TURN:
        result = tl.dot(right, tl.trans(left), input_precision="ieee")
    else:
        result = tl.dot(left, right, input_precision="ieee")
    return result


@triton.jit
def _by_token(gain, TURN: tl.constexpr):
    return gain[None, :] if TURN else gain[:, None]


@triton.jit
def _in_slot(at, col, K: tl.constexpr, TURN: tl.constexpr):
    """Return the offsets of value rows `at` and keys `col` in a head's slot: `[keys, values]`, or transposed with
    TURN."""
    return at[:, None] * K + col[None, :] if TURN else at[None, :] * K + col[:, None]


@triton.jit(do_not_specialize=["num_segments"])
def _scan_kernel(
    mixed,
    systems,
    scores,
    gains,
    pool,
    out,
    cu_seqlens,
    src,
    dst,
    save_ptr,
    save_pos,
    save_dst,
    skip,
    num_segments,
    mixed_stride,
    slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TURN: tl.constexpr,
    DELTA: tl.constexpr,
    FEW: tl.constexpr,
    FOR_FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Carry BLOCK_V value rows of one head's state through all chunks of one segment.

    The state and everything computed from it is held as `[.., V]`, or with TURN as `[V, ..]`. With FEW, this launch
    does nothing unless there are at most so many segments with tokens (FOR_FEW), or more (not FOR_FEW). Segments
    without tokens come last.
    """
    await_inputs(OVERLAP)
    if FEW:
        is_few = tl.load(cu_seqlens + tl.minimum(FEW, num_segments)) == tl.load(cu_seqlens + num_segments)
        if is_few != FOR_FEW:
            return
    tile, head, segment = head_tile(HV, V, BLOCK_V)
    kind = systems.dtype.element_ty
    row, col, at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    if TURN:
        in_state = (at < V)[:, None] & (col < K)[None, :]
        state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    else:
        in_state = (col < K)[:, None] & (at < V)[None, :]
        state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    source = tl.load(src + segment).to(tl.int64)
    if source >= 0:
        slot = pool + source * slot_stride + head * (V * K)
        state = tl.load(slot + _in_slot(at, col, K, TURN), mask=in_state, other=0.0).to(tl.float32)
    save, last_save = tl.load(save_ptr + segment), tl.load(save_ptr + segment + 1)
    entry = first_chunk(cu_seqlens, segment).to(tl.int64) * HV + head
    tokens = mixed + start.to(tl.int64) * mixed_stride
    keys, values = tokens + (head // (HV // H) * K + col)[None, :], tokens + (2 * H * K + head * V + at)[None, :]
    out_at = out + (start.to(tl.int64) * HV + head) * V + at[None, :]
    square = row[:, None] * CHUNK + row[None, :]
    num_chunks = tl.cdiv(length, CHUNK)
    gain = gains + entry * (GAINS * CHUNK)
    real = row < length
    if DELTA:
        past_k = tl.load(gain + row, mask=real, other=0.0)
    past_q = tl.load(gain + CHUNK + row, mask=real, other=0.0)
    new_k, whole = tl.load(gain + 2 * CHUNK + row, mask=real, other=0.0), tl.load(gain + GAINS * CHUNK - 1)
    begin = num_chunks * 0
    for e in range(save, last_save + 1):
        # Chunks up to the next state to store.
        end, target = num_chunks, tl.load(dst + segment)
        if e < last_save:
            end, target = tl.cdiv(tl.load(save_pos + e), CHUNK), tl.load(save_dst + e)
        for i in range(begin, end):
            # Load the next chunk during this chunk's products.
            gain = gains + (entry + tl.minimum(i + 1, num_chunks - 1) * HV) * (GAINS * CHUNK)
            if DELTA:
                next_past_k = tl.load(gain + row)
            next_past_q = tl.load(gain + CHUNK + row)
            next_new_k, next_whole = tl.load(gain + 2 * CHUNK + row), tl.load(gain + GAINS * CHUNK - 1)
            token = i * CHUNK + row
            place = token.to(tl.int64)[:, None]
            in_keys = (token < length)[:, None] & (col < K)[None, :]
            in_values = (token < length)[:, None] & (at < V)[None, :]
            own = (entry + i * HV) * (CHUNK * CHUNK) + square
            k = tl.load(keys + H * K + place * mixed_stride, mask=in_keys, other=0.0)
            v = tl.load(values + place * mixed_stride, mask=in_values, other=0.0)
            if DELTA:
                system = tl.load(systems + own)
            q = tl.load(keys + place * mixed_stride, mask=in_keys, other=0.0)
            score = tl.load(scores + own)
            old = state.to(kind)
            given = _turned(v, TURN).to(tl.float32)
            if DELTA:
                rest = given - _product(k, old, TURN) * _by_token(past_k, TURN)
                fresh = _product(system, rest.to(kind), TURN)
            else:
                fresh = given
            left = (fresh * _by_token(new_k, TURN)).to(kind)
            state = state * whole + _product(tl.trans(k), left, TURN)
            state = state.to(pool.dtype.element_ty).to(tl.float32)  # round as if the state were stored and resumed here
            answer = _product(q, old, TURN) * _by_token(past_q, TURN)
            answer += _product(score, fresh.to(kind), TURN)
            if skip is not None:
                answer += given * tl.load(skip + head)
            tl.store(out_at + place * (HV * V), _turned(answer, TURN).to(out.dtype.element_ty), mask=in_values)
            if DELTA:
                past_k = next_past_k
            past_q, new_k, whole = next_past_q, next_new_k, next_whole
        if target >= 0:
            # `nothing` keeps the compiler from computing the addresses before the loops, where they would fill
            # registers.
            nothing = tl.minimum(end - begin, 0)
            slot = pool + target.to(tl.int64) * slot_stride + head * (V * K)
            tl.store(slot + _in_slot(at + nothing, col, K, TURN), state.to(pool.dtype.element_ty), mask=in_state)
        begin = end


def _scans(mixed: Tensor, block_k: int, num_segments: int, programs: int) -> list[dict[str, Any]]:
    """Return the options of the scan's launches. A segment has `programs` programs with NARROW value rows each.

    All options give the same bits. Few programs are limited by latency, so they use narrow tiles and load far ahead.
    Many programs are limited by their loads, so they use wide tiles. A recorded step has more segments than most steps
    that replay it, and the number of those with tokens is only on the device. Both kinds are launched then, and one of
    them does nothing.
    """
    narrow = {"BLOCK_V": NARROW, "TURN": False, "num_warps": 4, "num_stages": 1, "FEW": 0, "FOR_FEW": True}
    if block_k > WIDE_KEYS or launch_table(mixed.device).narrow_scans:
        return [narrow]
    wide = {"BLOCK_V": MIN_WIDTH, "TURN": True, "num_warps": 4, "num_stages": 1, "FEW": 0, "FOR_FEW": False}
    few = traits_of(mixed.device).num_processors // programs
    if mixed.dtype == torch.float32 or not few:
        return [wide | {"num_stages": 1 if mixed.dtype == torch.float32 else 2}]
    scans = [narrow | {"num_stages": 3, "FEW": few}, wide | {"num_stages": 2, "FEW": few}]
    return scans[:1] if num_segments <= few else scans


def _chunks(
    inputs: RecurrenceInputs, params: RecurrenceParams, index: SegmentIndex, block_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the first launch; return (systems, scores, gains)."""
    assert index.tiles is not None, "kernels need the index's tiles"
    shape, mixed, (given, options) = params.spec, inputs.mixed, described(inputs, params)
    entries = (mixed.shape[0] // TILE + len(index)) * shape.num_v_heads
    scores = mixed.new_empty(entries, TILE, TILE)
    systems = mixed.new_empty(entries, TILE, TILE) if shape.delta else scores
    gains = torch.empty(entries, GAINS.value, TILE, dtype=torch.float32, device=mixed.device)
    wide = mixed.dtype == torch.float32
    options |= {"num_warps": 8} if wide else {"num_warps": 4, **capped_registers(mixed.device, CHUNK_REGISTERS)}
    options |= {"BLOCK_K": block_k, **overlap(mixed.device, mixed.shape[0])}
    for tiles in turns(index.tiles, shape.num_v_heads):
        grid = (tiles.shape[0] * shape.num_v_heads,)
        _chunk_kernel[grid](*given, tiles, index.cu_seqlens, systems, scores, gains, **options)
    return systems, scores, gains


def recurrence_prefill(
    inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: SegmentIndex, out: Out = None
) -> Tensor:
    """Run the recurrence over segments; return `[T, HV, V]`, in `out` if it is given.

    Reads and writes `pool[P, HV, V, K]` as `index` says. Scratch memory is about `T * HV * 144` elements of the
    inputs' dtype.
    """
    shape, mixed = params.spec, inputs.mixed
    if shape.per_key:
        return key_prefill(inputs, params, pool, index, out)
    out = result(inputs, params, pool, out)
    block_k = max(MIN_WIDTH, next_power_of_2(shape.key_dim))
    scratch = _chunks(inputs, params, index, block_k)
    shared = {**sizes(shape), "BLOCK_K": block_k, "DELTA": shape.delta, **overlap(mixed.device, mixed.shape[0])}
    numbers = (len(index), mixed.stride(0), pool.stride(0))
    for options in _scans(mixed, block_k, len(index), shape.num_v_heads * ceil_div(shape.value_dim, NARROW)):
        each = shape.num_v_heads * ceil_div(shape.value_dim, options["BLOCK_V"])
        most = options["FEW"] if options["FOR_FEW"] and options["FEW"] else len(index)
        for count, (systems, scores, gains, *columns) in segments(index, each, scratch, shape.num_v_heads):
            given = (mixed, systems, scores, gains, pool, out, *columns, params.D, *numbers)
            _scan_kernel[(min(count, most) * each,)](*given, **options, **shared)
    return out
