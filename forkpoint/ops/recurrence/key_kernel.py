"""Prefill of the delta rule with a decay per key (KDA) in Triton. reference.py has the formulas.

Three launches prepare all chunks at once, and a fourth carries the states through them:

1. `_chunk_kernel` writes q and k multiplied by their decays.
2. `_pair_kernel` writes the products of keys and queries, with the decays inside the products. Rows are processed in
   blocks of 16. The decay from a key to a row is the product of the decay from the key to the block's first row and the
   decay from there to the row. Exponents of keys before the block are never positive. Exponents within the block can be
   positive and large; then each pair of rows gets its own exponential.
3. `_invert_kernel` inverts each chunk's triangular system.
4. `_scan_kernel` walks each segment's chunks in order, with BLOCK_V value rows of the state per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.launch_table import segments, turns
from forkpoint.ops.metadata import TILE, SegmentIndex
from forkpoint.ops.parameters import Out, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.gates import L2_EPS, described, head_tile, key_decay, result, weight
from forkpoint.ops.recurrence.solve import BLOCKS, CHUNK, SUB, chunk_place, first_chunk, unit_lower_inverse
from forkpoint.ops.rounding import ceil_div, next_power_of_2

# Largest exponents whose powers fit in bfloat16 and fp32, and in float16.
WIDEST, WIDEST_HALF = tl.constexpr(60.0), tl.constexpr(8.0)
SCAN_VALUES = 32  # value rows per program of the scan


@triton.jit
def _chunk_kernel(
    mixed,
    a,
    a_log,
    dt_bias,
    tiles,
    cu_seqlens,
    keys,
    totals,
    wholes,
    mixed_stride,
    a_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BOUND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one chunk of one head.

    Writes `totals[entry]`, the cumulative sums of g, `[C, K]`, and `keys[entry]`, the factors of `S k`, of `S q` and of
    the state's update, `[3, C, K]`."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    tile, head = pid // H, pid % H
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    kind: tl.constexpr = keys.dtype.element_ty
    start, count, entry = chunk_place(cu_seqlens, segment, offset, head, H)
    row, col = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token = start.to(tl.int64) + row
    inside = (row < count)[:, None] & (col < K)[None, :]
    raw = tl.load(a + token[:, None] * a_stride + (head * K + col)[None, :], mask=inside, other=0.0)
    bias = tl.load(dt_bias + head * K + col, mask=col < K, other=0.0)
    g = tl.where(inside, key_decay(raw, tl.load(a_log + head), bias[None, :], BOUND), 0.0)
    total, last = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
    own = row[:, None] * K + col[None, :]
    in_keys = (col < K)[None, :] & (row >= 0)[:, None]
    tl.store(totals + entry * (CHUNK * K) + own, total, mask=in_keys)
    tl.store(wholes + entry * K + col, tl.exp(last), mask=col < K)
    grown = tl.exp(total)
    q_at = mixed + token[:, None] * mixed_stride + (head * K + col)[None, :]
    key_at = keys + entry * (3 * CHUNK * K) + own
    k = tl.load(q_at + H * K, mask=inside, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + L2_EPS)[:, None]
    tl.store(key_at, (k * grown).to(kind), mask=in_keys)
    tl.store(key_at + 2 * CHUNK * K, (k * tl.exp(last[None, :] - total)).to(kind), mask=in_keys)
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + L2_EPS) * scale)[:, None]
    tl.store(key_at + CHUNK * K, (q * grown).to(kind), mask=in_keys)


@triton.jit
def _pair_kernel(
    mixed,
    b,
    tiles,
    cu_seqlens,
    totals,
    systems,
    scores,
    mixed_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute SUB rows i of a chunk against all its rows j: `sum_d x_id k_jd e^{total_id - total_jd}`.

    Writes `scores[entries, C, C]` with x = q, zero unless i >= j, and fp32 `systems[entries, C, C]` with x = beta k,
    zero unless i > j."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    block, head, tile = pid % BLOCKS, pid // BLOCKS % H, pid // (BLOCKS * H)
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    kind: tl.constexpr = scores.dtype.element_ty
    widest: tl.constexpr = WIDEST_HALF if kind == tl.float16 else WIDEST
    start, count, entry = chunk_place(cu_seqlens, segment, offset, head, H)
    sub, at, col = tl.arange(0, SUB), tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row, in_k, first_row = block * SUB + sub, col < K, block * SUB
    # Keys up to the last of these rows; later keys have score zero.
    past = (at < first_row + SUB) & (at < count)
    key_at = mixed + H * K + (start.to(tl.int64) + at)[:, None] * mixed_stride + (head * K + col)[None, :]
    k = tl.load(key_at, mask=past[:, None] & in_k[None, :], other=0.0).to(tl.float32)
    since_at = totals + entry * (CHUNK * K) + at[:, None] * K + col[None, :]
    since = tl.load(since_at, mask=(at < first_row + SUB)[:, None] & in_k[None, :], other=0.0)
    inside = (row < count)[:, None] & in_k[None, :]
    q_at = mixed + (start.to(tl.int64) + row)[:, None] * mixed_stride + (head * K + col)[None, :]
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    left = tl.load(q_at + H * K, mask=inside, other=0.0).to(tl.float32)
    total_at = totals + entry * (CHUNK * K) + col
    total = tl.load(total_at[None, :] + row[:, None] * K, mask=in_k[None, :], other=0.0)
    first = tl.load(total_at + first_row * K, mask=in_k, other=0.0)
    end = tl.load(total_at + (first_row + SUB - 1) * K, mask=in_k, other=0.0)
    beta = weight(tl.load(b + (start.to(tl.int64) + row) * b_stride + head, mask=row < count, other=0.0), DOUBLE_BETA)
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + L2_EPS)[:, None]
    left *= tl.rsqrt(tl.sum(left * left, axis=1) + L2_EPS)[:, None]
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + L2_EPS) * scale)[:, None]
    shrunk = tl.exp(total - first[None, :])
    right = tl.trans((k * tl.exp(tl.minimum(first[None, :] - since, widest))).to(kind))
    score = tl.dot((q * shrunk).to(kind), right, input_precision="ieee")
    system = tl.dot((left * shrunk).to(kind), right, input_precision="ieee")
    if tl.max(first - end, axis=0) > widest:
        for j in range(SUB):
            real = in_k & (first_row + j < count)
            one_at = mixed + H * K + (start.to(tl.int64) + first_row + j) * mixed_stride + head * K + col
            key = tl.load(one_at, mask=real, other=0.0).to(tl.float32)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + L2_EPS)
            since_j = tl.load(total_at + (first_row + j) * K, mask=in_k, other=0.0)
            pair = key[None, :] * tl.exp(tl.minimum(total - since_j[None, :], 0.0))
            only = (at == first_row + j)[None, :]
            score = tl.where(only, tl.sum(q * pair, axis=1)[:, None], score)
            system = tl.where(only, tl.sum(left * pair, axis=1)[:, None], system)
    square = entry * (CHUNK * CHUNK) + row[:, None] * CHUNK + at[None, :]
    tl.store(scores + square, tl.where(row[:, None] >= at[None, :], score, 0.0).to(kind))
    tl.store(systems + square, tl.where(row[:, None] > at[None, :], system * beta[:, None], 0.0))


@triton.jit
def _invert_kernel(
    b,
    tiles,
    cu_seqlens,
    systems,
    inverses,
    b_stride,
    H: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write `(I + systems[entry])^-1 diag(beta)` of one chunk of one head to `inverses[entry]`, `[C, C]`."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    tile, head = pid // H, pid % H
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    kind: tl.constexpr = inverses.dtype.element_ty
    start, count, entry = chunk_place(cu_seqlens, segment, offset, head, H)
    row = tl.arange(0, CHUNK)
    beta = weight(tl.load(b + (start.to(tl.int64) + row) * b_stride + head, mask=row < count, other=0.0), DOUBLE_BETA)
    square = entry * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    inverse = unit_lower_inverse(tl.load(systems + square), kind != tl.float32)
    tl.store(inverses + square, (inverse * tl.where(row < count, beta, 0.0)[None, :]).to(kind))


@triton.jit
def _scan_kernel(
    mixed,
    inverses,
    scores,
    keys,
    wholes,
    pool,
    out,
    cu_seqlens,
    src,
    dst,
    save_ptr,
    save_pos,
    save_dst,
    mixed_stride,
    slot_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Carry BLOCK_V value rows of one head's state, held as `[K, V]`, through all chunks of one segment."""
    await_inputs(OVERLAP)
    tile, head, segment = head_tile(H, V, BLOCK_V)
    kind = inverses.dtype.element_ty
    row, col, at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    in_state = (col < K)[:, None] & (at < V)[None, :]
    in_keys = (row >= 0)[:, None] & (col < K)[None, :]
    in_slot = head * (V * K) + at[None, :] * K + col[:, None]
    source = tl.load(src + segment).to(tl.int64)
    state = tl.load(pool + source * slot_stride + in_slot, mask=in_state & (source >= 0), other=0.0).to(tl.float32)
    save, last_save = tl.load(save_ptr + segment), tl.load(save_ptr + segment + 1)
    entry = first_chunk(cu_seqlens, segment).to(tl.int64) * H + head
    values = mixed + start.to(tl.int64) * mixed_stride + (2 * H * K + head * V + at)[None, :]
    out_at = out + (start.to(tl.int64) * H + head) * V + at[None, :]
    square = row[:, None] * CHUNK + row[None, :]
    num_chunks = tl.cdiv(length, CHUNK)
    for e in range(save, last_save + 1):
        # Chunks between two stored states. `begin = end` below would be a constant to Triton 3.6 and 3.7.
        begin, end, target = num_chunks * 0, num_chunks, tl.load(dst + segment)
        if e > save:
            begin = tl.cdiv(tl.load(save_pos + e - 1), CHUNK)
        if e < last_save:
            end, target = tl.cdiv(tl.load(save_pos + e), CHUNK), tl.load(save_dst + e)
        for i in range(begin, end):
            own = entry + i * H
            token = i * CHUNK + row
            in_values = (token < length)[:, None] & (at < V)[None, :]
            key_at = keys + own * (3 * CHUNK * K) + row[:, None] * K + col[None, :]
            past_k = tl.load(key_at, mask=in_keys, other=0.0)
            past_q = tl.load(key_at + CHUNK * K, mask=in_keys, other=0.0)
            new_k = tl.load(key_at + 2 * CHUNK * K, mask=in_keys, other=0.0)
            whole = tl.load(wholes + own * K + col, mask=col < K, other=0.0)
            v = tl.load(values + token.to(tl.int64)[:, None] * mixed_stride, mask=in_values, other=0.0)
            inverse = tl.load(inverses + own * CHUNK * CHUNK + square)
            score = tl.load(scores + own * CHUNK * CHUNK + square)
            old = state.to(kind)
            rest = v.to(tl.float32) - tl.dot(past_k, old, input_precision="ieee")
            fresh = tl.dot(inverse, rest.to(kind), input_precision="ieee").to(kind)
            answer = tl.dot(past_q, old, input_precision="ieee") + tl.dot(score, fresh, input_precision="ieee")
            state = state * whole[:, None] + tl.dot(tl.trans(new_k), fresh, input_precision="ieee")
            state = state.to(pool.dtype.element_ty).to(tl.float32)  # round as if the state were stored and resumed here
            place_at = out_at + token.to(tl.int64)[:, None] * (H * V)
            tl.store(place_at, answer.to(out.dtype.element_ty), mask=in_values)
        if target >= 0:
            slot = pool + target.to(tl.int64) * slot_stride + in_slot
            tl.store(slot, state.to(pool.dtype.element_ty), mask=in_state)


def _ready_chunks(
    inputs: RecurrenceInputs, params: RecurrenceParams, index: SegmentIndex, block_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the first three launches.

    Returns (inverses times beta `[entries, C, C]`, scores `[entries, C, C]`, key factors `[entries, 3, C, K]`, decays
    over each chunk `[entries, K]` fp32)."""
    assert index.tiles is not None, "kernels need the index's tiles"
    spec, heads, dim = params.spec, params.spec.num_v_heads, params.spec.key_dim
    (mixed, a, b, *constants), _ = described(inputs, params)
    entries = (mixed.shape[0] // TILE + len(index)) * heads
    inverses, scores = mixed.new_empty(2, entries, TILE, TILE)
    keys = mixed.new_empty(entries, 3, TILE, dim)
    systems, totals, wholes = (
        torch.empty(entries, *shape, dtype=torch.float32, device=mixed.device)
        for shape in ((TILE, TILE), (TILE, dim), (dim,))
    )
    sizes = {"H": heads, "K": dim, "BLOCK_K": block_k}
    options = {**overlap(mixed.device, mixed.shape[0]), "num_stages": 1}
    weights = {"DOUBLE_BETA": spec.double_beta, **options}
    for tiles in turns(index.tiles, heads * BLOCKS.value):
        places, chunks = (tiles, index.cu_seqlens), tiles.shape[0] * heads
        given = (mixed, a, *constants, *places, keys, totals, wholes, mixed.stride(0), a.stride(0), dim**-0.5)
        _chunk_kernel[(chunks,)](*given, BOUND=spec.bound or 0.0, num_warps=8, **sizes, **options)
        strides = (mixed.stride(0), b.stride(0), dim**-0.5)
        _pair_kernel[(chunks * BLOCKS.value,)](
            mixed, b, *places, totals, systems, scores, *strides, num_warps=8, **sizes, **weights
        )
        _invert_kernel[(chunks,)](b, *places, systems, inverses, b.stride(0), H=heads, num_warps=2, **weights)
    return inverses, scores, keys, wholes


def key_prefill(
    inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: SegmentIndex, out: Out = None
) -> Tensor:
    """Run the delta rule with a decay per key, `a[T, H * K]`, over segments; return `[T, HV, V]`.

    Reads states from `pool` and stores the new ones there, as `index` says. Writes to `out` if it is given.

    Scratch memory is about `T * H * (3 K + 128)` elements of the inputs' dtype and `T * H * (K + 64)` in fp32.
    """
    spec, mixed, out = params.spec, inputs.mixed, result(inputs, params, pool, out)
    heads, dim, value_dim = spec.num_v_heads, spec.key_dim, spec.value_dim
    block_k = max(16, next_power_of_2(dim))
    scratch = _ready_chunks(inputs, params, index, block_k)
    block_v = max(16, min(SCAN_VALUES, next_power_of_2(value_dim)))
    each = heads * ceil_div(value_dim, block_v)
    options = {"H": heads, "K": dim, "V": value_dim, "BLOCK_K": block_k, "BLOCK_V": block_v}
    options |= {"num_warps": 4, "num_stages": 1 if mixed.dtype == torch.float32 else 3}
    options |= overlap(mixed.device, mixed.shape[0])
    strides = (mixed.stride(0), pool.stride(0))
    for count, (inverses, scores, keys, wholes, *columns) in segments(index, each, scratch, heads):
        given = (mixed, inverses, scores, keys, wholes, pool, out, *columns, *strides)
        _scan_kernel[(count * each,)](*given, **options)
    return out
