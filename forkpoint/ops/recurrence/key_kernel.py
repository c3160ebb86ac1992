"""The delta rule with a decay for each key (KDA) in Triton; reference.py has the formulas.

As in prefill_kernel.py there are two launches, but decays stand inside the products of keys. The first writes q and k
times what is left of them, which the second takes as they are. A row's decay to a key is the product of one that ends
and one that starts at the first row of the row's 16: no exponent is positive. Rows of one such block have no row
between them, and each pair its own exponential: decays are not bounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid, softplus
from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.metadata import TILE, DecodeIndex, SegmentIndex
from forkpoint.ops.recurrence.gates import L2_EPS, checked, weight
from forkpoint.ops.recurrence.solve import BLOCKS, CHUNK, SUB, first_chunk, unit_lower_inverse
from forkpoint.ops.table import RecurrenceParams

VALUES = 8  # value rows of a decode program
SCAN_VALUES = 32  # and of one of the second launch


@triton.jit
def _decay(a, a_log, dt_bias, BOUND: tl.constexpr):
    """Logs of decays in fp32 of raw `a`."""
    raw, rate = a.to(tl.float32) + dt_bias, tl.exp(a_log)
    return -rate * softplus(raw) if BOUND == 0 else BOUND * sigmoid(rate * raw)


@triton.jit
def _decode_kernel(
    mixed,
    a,
    b,
    a_log,
    dt_bias,
    pool,
    out,
    src,
    dst,
    mixed_stride,
    a_stride,
    b_stride,
    slot_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES_V: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    BOUND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_V value rows of one head of one sequence: the state is read once and written once."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    head = (pid // TILES_V) % H
    row = (pid // (TILES_V * H)).to(tl.int64)
    col, at = tl.arange(0, BLOCK_K), (pid % TILES_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    inside = (at < V)[:, None] & (col < K)[None, :]
    slot_at = pool + head * (V * K) + at[:, None] * K + col[None, :]
    state = tl.load(slot_at + source * slot_stride, mask=inside & (source >= 0), other=0.0).to(tl.float32)
    tokens = mixed + row * mixed_stride
    q = tl.load(tokens + head * K + col, mask=col < K, other=0.0).to(tl.float32)
    k = tl.load(tokens + H * K + head * K + col, mask=col < K, other=0.0).to(tl.float32)
    v = tl.load(tokens + 2 * H * K + head * V + at, mask=at < V, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
    raw = tl.load(a + row * a_stride + head * K + col, mask=col < K, other=0.0)
    bias = tl.load(dt_bias + head * K + col, mask=col < K, other=0.0)
    state *= tl.exp(_decay(raw, tl.load(a_log + head), bias, BOUND))[None, :]
    beta = weight(tl.load(b + row * b_stride + head), DOUBLE_BETA)
    fresh = beta * (v - tl.sum(state * k[None, :], axis=1))
    state += fresh[:, None] * k[None, :]
    answer = tl.sum(state * q[None, :], axis=1)
    tl.store(out + (row * H + head) * V + at, answer.to(out.dtype.element_ty), mask=at < V)
    tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside & (target >= 0))


@triton.jit
def _pairs(left, k, total, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """`sum_d left_id k_jd e^{total_id - total_jd}` for i >= j, else 0: `[C, WIDTH]` each -> fp32 `[C, C]`."""
    row, sub = tl.arange(0, CHUNK), tl.arange(0, SUB)
    square = tl.zeros((CHUNK, CHUNK), tl.float32)
    for block in tl.static_range(1, BLOCKS):
        first = tl.sum(tl.where((row == block * SUB)[:, None], total, 0.0), axis=0)
        steps = total - first[None, :]
        mine, earlier = (row // SUB == block)[:, None], (row < block * SUB)[:, None]
        ours = tl.where(mine, left * tl.exp(tl.minimum(steps, 0.0)), 0.0)
        theirs = tl.where(earlier, k * tl.exp(tl.minimum(-steps, 0.0)), 0.0)
        square += tl.dot(ours.to(KIND), tl.trans(theirs.to(KIND)), input_precision="ieee")
    lefts = tl.reshape(left, (BLOCKS, SUB, WIDTH))
    keys, totals = tl.reshape(k, (BLOCKS, SUB, WIDTH)), tl.reshape(total, (BLOCKS, SUB, WIDTH))
    diagonal = tl.zeros((BLOCKS, SUB, SUB), tl.float32)
    for j in range(SUB):
        only = (sub == j)[None, :, None]
        key = tl.sum(tl.where(only, keys, 0.0), axis=1)[:, None, :]
        since = tl.sum(tl.where(only, totals, 0.0), axis=1)[:, None, :]
        column = tl.sum(lefts * key * tl.exp(tl.minimum(totals - since, 0.0)), axis=2)
        column = tl.where((sub >= j)[None, :], column, 0.0)
        diagonal += tl.where((sub == j)[None, None, :], column[:, :, None], 0.0)
    block = tl.arange(0, BLOCKS)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    return square + tl.reshape(tl.where(same, diagonal[:, :, None, :], 0.0), (CHUNK, CHUNK))


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
    keys,
    wholes,
    mixed_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    BOUND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One chunk of one head. `keys[entry]` are the factors of `S k`, `S q` and of the state's update, `[3, C, K]`."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    tile, head = pid // H, pid % H
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    kind: tl.constexpr = keys.dtype.element_ty
    start = tl.load(cu_seqlens + segment) + offset
    count = tl.load(cu_seqlens + segment + 1) - start
    entry = (first_chunk(cu_seqlens, segment) + offset // CHUNK).to(tl.int64) * H + head
    row, col = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token, present = start.to(tl.int64) + row, row < count
    inside = present[:, None] & (col < K)[None, :]
    q_at = mixed + token[:, None] * mixed_stride + (head * K + col)[None, :]
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(q_at + H * K, mask=inside, other=0.0).to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + L2_EPS) * scale)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + L2_EPS)[:, None]
    raw = tl.load(a + token[:, None] * a_stride + (head * K + col)[None, :], mask=inside, other=0.0)
    bias = tl.load(dt_bias + head * K + col, mask=col < K, other=0.0)
    g = tl.where(inside, _decay(raw, tl.load(a_log + head), bias[None, :], BOUND), 0.0)
    beta = weight(tl.load(b + token * b_stride + head, mask=present, other=0.0), DOUBLE_BETA)
    beta = tl.where(present, beta, 0.0)
    total = tl.cumsum(g, axis=0)
    last = tl.sum(g, axis=0)
    grown = tl.exp(total)
    key_at = keys + entry * (3 * CHUNK * K) + row[:, None] * K + col[None, :]
    in_keys = (col < K)[None, :] & (row >= 0)[:, None]
    tl.store(key_at, (k * grown).to(kind), mask=in_keys)
    tl.store(key_at + CHUNK * K, (q * grown).to(kind), mask=in_keys)
    tl.store(key_at + 2 * CHUNK * K, (k * tl.exp(last[None, :] - total)).to(kind), mask=in_keys)
    tl.store(wholes + entry * K + col, tl.exp(last), mask=col < K)
    square = entry * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    tl.store(scores + square, _pairs(q, k, total, kind, BLOCK_K).to(kind))
    system = _pairs(k, k, total, kind, BLOCK_K) * beta[:, None]
    inverse = unit_lower_inverse(tl.where(row[:, None] > row[None, :], system, 0.0), kind != tl.float32)
    tl.store(systems + square, (inverse * beta[None, :]).to(kind))


@triton.jit
def _scan_kernel(
    mixed,
    systems,
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
    TILES_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_V value rows of one head's state, `[K, V]`, through all chunks of one segment."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    head, segment = (pid // TILES_V) % H, pid // (TILES_V * H)
    kind = systems.dtype.element_ty
    row, col, at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), (pid % TILES_V) * BLOCK_V + tl.arange(0, BLOCK_V)
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
    begin = num_chunks * 0
    for e in range(save, last_save + 1):
        # Up to the next state to store.
        end, target = num_chunks, tl.load(dst + segment)
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
            system, score = (
                tl.load(systems + own * CHUNK * CHUNK + square),
                tl.load(scores + own * CHUNK * CHUNK + square),
            )
            old = state.to(kind)
            rest = v.to(tl.float32) - tl.dot(past_k, old, input_precision="ieee")
            fresh = tl.dot(system, rest.to(kind), input_precision="ieee").to(kind)
            answer = tl.dot(past_q, old, input_precision="ieee") + tl.dot(score, fresh, input_precision="ieee")
            state = state * whole[:, None] + tl.dot(tl.trans(new_k), fresh, input_precision="ieee")
            place_at = out_at + token.to(tl.int64)[:, None] * (H * V)
            tl.store(place_at, answer.to(out.dtype.element_ty), mask=in_values)
        if target >= 0:
            slot = pool + target.to(tl.int64) * slot_stride + in_slot
            tl.store(slot, state.to(pool.dtype.element_ty), mask=in_state)
        begin = end


def _chunks(
    mixed: Tensor, a: Tensor, b: Tensor, params: RecurrenceParams, index: SegmentIndex, block_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first launch: (systems, scores, keys, wholes)."""
    assert index.tiles is not None, "kernels need the index's tiles"
    spec, heads, dim = params.spec, params.spec.num_v_heads, params.spec.key_dim
    entries = (mixed.shape[0] // TILE + len(index)) * heads
    systems, scores = mixed.new_empty(2, entries, TILE, TILE)
    keys = mixed.new_empty(entries, 3, TILE, dim)
    wholes = torch.empty(entries, dim, dtype=torch.float32, device=mixed.device)
    _chunk_kernel[(index.tiles.shape[0] * heads,)](
        mixed,
        a,
        b,
        params.A_log,
        params.dt_bias,
        index.tiles,
        index.cu_seqlens,
        systems,
        scores,
        keys,
        wholes,
        *(x.stride(0) for x in (mixed, a, b)),
        dim**-0.5,
        H=heads,
        K=dim,
        BLOCK_K=block_k,
        DOUBLE_BETA=spec.double_beta,
        BOUND=spec.bound or 0.0,
        **overlap(mixed.device, mixed.shape[0]),
        num_warps=8,
        num_stages=1,
    )
    return systems, scores, keys, wholes


def key_prefill(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    params: RecurrenceParams,
    pool: Tensor,
    index: SegmentIndex,
    out: Tensor | None = None,
) -> Tensor:
    """`recurrence_prefill` where each key has its own decay: `a[T, H * K]`. Scratch memory is about
    `T * H * (3 K + 128)` elements of the inputs' dtype."""
    spec = params.spec
    b, out = checked(spec, mixed, a, b, pool, out)
    heads, dim, value_dim = spec.num_v_heads, spec.key_dim, spec.value_dim
    block_k = max(16, triton.next_power_of_2(dim))
    systems, scores, keys, wholes = _chunks(mixed, a, b, params, index, block_k)
    block_v = max(16, min(SCAN_VALUES, triton.next_power_of_2(value_dim)))
    tiles_v = triton.cdiv(value_dim, block_v)
    _scan_kernel[(len(index) * heads * tiles_v,)](
        mixed,
        systems,
        scores,
        keys,
        wholes,
        pool,
        out,
        *index.columns,
        mixed.stride(0),
        pool.stride(0),
        H=heads,
        K=dim,
        V=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        TILES_V=tiles_v,
        **overlap(mixed.device, mixed.shape[0]),
        num_warps=4,
        num_stages=1 if mixed.dtype == torch.float32 else 2,
    )
    return out


def key_decode(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    params: RecurrenceParams,
    pool: Tensor,
    index: DecodeIndex,
    out: Tensor | None = None,
) -> Tensor:
    """`recurrence_decode` where each key has its own decay: `a[B, H * K]`."""
    spec = params.spec
    b, out = checked(spec, mixed, a, b, pool, out)
    heads, value_dim = spec.num_v_heads, spec.value_dim
    block_v = min(VALUES, triton.next_power_of_2(value_dim))
    tiles_v = triton.cdiv(value_dim, block_v)
    _decode_kernel[(mixed.shape[0] * heads * tiles_v,)](
        mixed,
        a,
        b,
        params.A_log,
        params.dt_bias,
        pool,
        out,
        index.src,
        index.dst,
        *(x.stride(0) for x in (mixed, a, b)),
        pool.stride(0),
        spec.key_dim**-0.5,
        H=heads,
        K=spec.key_dim,
        V=value_dim,
        BLOCK_K=triton.next_power_of_2(spec.key_dim),
        BLOCK_V=block_v,
        TILES_V=tiles_v,
        DOUBLE_BETA=spec.double_beta,
        BOUND=spec.bound or 0.0,
        **overlap(mixed.device, mixed.shape[0]),
        num_warps=1,
        num_stages=1,
    )
    return out
