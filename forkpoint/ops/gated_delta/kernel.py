"""The gated delta rule in Triton; reference.py has the formulas.

Prefill is two launches. The first works on all 64-token chunks at once: gates, normalised q and k, the chunk's
triangular system, its scores. The second walks each segment's chunks in order, with the fp32 state in registers, and
stores the state to slots where the index says so. Products take bfloat16 operands for bfloat16 inputs and fp32
operands otherwise; every sum is fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid, softplus
from forkpoint.ops.metadata import TILE, DecodeIndex, SegmentIndex
from forkpoint.ops.table import GDNParams, GDNShape

CHUNK = tl.constexpr(TILE)
SUB = tl.constexpr(16)  # rows of the diagonal blocks that are inverted one row at a time
BLOCKS = tl.constexpr(TILE // 16)
L2_EPS = tl.constexpr(1e-6)
SCAN_VALUES = 32  # value rows of a state that one program carries through a segment
DECODE_VALUES = 8
# Of a chunk's tiles. Triton 3.6 reserves too little shared memory to store a bfloat16 product of 64 by 32.
MIN_WIDTH = 64


@triton.jit
def _normalised(x):
    """fp32 `[C, K]` rows over their l2 norms."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + L2_EPS)[:, None]


@triton.jit
def _unit_lower_inverse(system, HALF: tl.constexpr):
    """`(I + A)^-1` of a strictly lower triangular fp32 `[C, C]`.

    The 16-row diagonal blocks by forward substitution, all together, column by column. Then with D their inverses and
    L the blocks below them, `N = D L` has `N^4 = 0`, so that `(I + A)^-1 = (I - N)(I + N^2) D`. HALF takes float16
    operands for these products: as exact as tf32, and every entry is a product of contractions, so none is large.
    """
    block, row, at = tl.arange(0, BLOCKS), tl.arange(0, SUB), tl.arange(0, CHUNK)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(system, (BLOCKS, SUB, BLOCKS, SUB)), 0.0), axis=2)
    inverse = tl.zeros((BLOCKS, SUB, SUB), tl.float32) + (row[:, None] == row[None, :]).to(tl.float32)[None, :, :]
    for j in range(SUB - 1):
        # Row j of the inverse is final; the rows below it take their share of it.
        column = tl.sum(tl.where((row == j)[None, None, :], diagonal, 0.0), axis=2)
        final = tl.sum(tl.where((row == j)[None, :, None], inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * final[:, None, :]
    kind: tl.constexpr = tl.float16 if HALF else tl.float32
    wide = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (CHUNK, CHUNK)).to(kind)
    below = tl.where((at // SUB)[:, None] > (at // SUB)[None, :], system, 0.0).to(kind)
    unit = (at[:, None] == at[None, :]).to(tl.float32)
    first = tl.dot(wide, below, input_precision="ieee")
    step = first.to(kind)
    square = tl.dot(step, step, input_precision="ieee")
    series = unit - first + square
    series -= tl.dot(step, square.to(kind), input_precision="ieee")
    return tl.dot(series.to(kind), wide, input_precision="ieee")


@triton.jit
def _gates(a, b, a_log, dt_bias, DOUBLE_BETA: tl.constexpr):
    """(g, beta) in fp32 of raw `a` and `b`."""
    g = -tl.exp(a_log) * softplus(a.to(tl.float32) + dt_bias)
    beta = sigmoid(b.to(tl.float32))
    return g, (beta * 2.0 if DOUBLE_BETA else beta)


@triton.jit
def _place(cu_seqlens, segment):
    """Of a segment's first chunk in the scratch buffers, which have room for T // 64 + N chunks."""
    return tl.load(cu_seqlens + segment) // CHUNK + segment


@triton.jit
def _chunk_kernel(
    mixed,
    a,
    b,
    a_log,
    dt_bias,
    tiles,
    cu_seqlens,
    q_out,
    k_out,
    w_out,
    u_out,
    scores_out,
    decay_out,
    mixed_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    HALF: tl.constexpr,
):
    """One chunk of one value head. Scratch rows behind a segment's end get zeros."""
    pid = tl.program_id(0)
    tile, head = pid // HV, pid % HV
    key_head = head // (HV // H)
    kind = q_out.dtype.element_ty
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start = tl.load(cu_seqlens + segment) + offset
    count = tl.load(cu_seqlens + segment + 1) - start
    place = (_place(cu_seqlens, segment) + offset // CHUNK).to(tl.int64)
    row, col = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token = start.to(tl.int64) + row
    present = row < count
    raw_a = tl.load(a + token * a_stride + head, mask=present, other=0.0)
    raw_b = tl.load(b + token * b_stride + head, mask=present, other=0.0)
    g, beta = _gates(raw_a, raw_b, tl.load(a_log + head), tl.load(dt_bias + head), DOUBLE_BETA)
    total = tl.cumsum(tl.where(present, g, 0.0), axis=0)
    beta = tl.where(present, beta, 0.0)
    inside = present[:, None] & (col < K)[None, :]
    q_at = mixed + token[:, None] * mixed_stride + (key_head * K + col)[None, :]
    q = (_normalised(tl.load(q_at, mask=inside, other=0.0).to(tl.float32)) * scale).to(kind)
    k = _normalised(tl.load(q_at + H * K, mask=inside, other=0.0).to(tl.float32)).to(kind)
    scratch = row[:, None] * BLOCK_K + col[None, :]
    if head % (HV // H) == 0:
        first = (place * H + key_head) * (CHUNK * BLOCK_K)
        tl.store(q_out + first + scratch, q)
        tl.store(k_out + first + scratch, k)
    decays = tl.exp(tl.where(row[:, None] >= row[None, :], total[:, None] - total[None, :], float("-inf")))
    k_t = tl.trans(k)
    entry = place * HV + head
    square = row[:, None] * CHUNK + row[None, :]
    scores = tl.dot(q, k_t, input_precision="ieee") * decays
    tl.store(scores_out + entry * (CHUNK * CHUNK) + square, scores.to(kind))
    tl.store(decay_out + entry * CHUNK + row, total)
    system = tl.dot(k, k_t, input_precision="ieee") * decays * beta[:, None]
    inverse = _unit_lower_inverse(tl.where(row[:, None] > row[None, :], system, 0.0), HALF)
    left = (inverse * (beta * tl.exp(total))[None, :]).to(kind)
    w = tl.dot(left, k, input_precision="ieee")
    tl.store(w_out + entry * (CHUNK * BLOCK_K) + scratch, w.to(kind))
    right = (inverse * beta[None, :]).to(kind)
    for first_v in tl.static_range(0, PADDED_V, BLOCK_V):
        at = first_v + tl.arange(0, BLOCK_V)
        v_at = mixed + token[:, None] * mixed_stride + (2 * H * K + head * V + at)[None, :]
        v = tl.load(v_at, mask=present[:, None] & (at < V)[None, :], other=0.0).to(kind)
        u = tl.dot(right, v, input_precision="ieee")
        tl.store(u_out + entry * (CHUNK * PADDED_V) + row[:, None] * PADDED_V + at[None, :], u.to(kind))


@triton.jit
def _scan_kernel(
    q,
    k,
    w,
    u,
    scores,
    decay,
    pool,
    out,
    cu_seqlens,
    src,
    dst,
    exp_ptr,
    exp_pos,
    exp_dst,
    slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    """BLOCK_V value rows of one head's state, through all chunks of one segment. The state is held as `[K, V]`."""
    pid = tl.program_id(0)
    tiles_v: tl.constexpr = PADDED_V // BLOCK_V
    first_v = (pid % tiles_v) * BLOCK_V
    head = (pid // tiles_v) % HV
    segment = pid // (tiles_v * HV)
    kind = q.dtype.element_ty
    row, col, at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), first_v + tl.arange(0, BLOCK_V)
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    in_state = (col < K)[:, None] & (at < V)[None, :]
    slot_at = pool + head * (V * K) + at[None, :] * K + col[:, None]
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    source = tl.load(src + segment).to(tl.int64)
    if source >= 0:
        state = tl.load(slot_at + source * slot_stride, mask=in_state, other=0.0).to(tl.float32)
    export, last_export = tl.load(exp_ptr + segment), tl.load(exp_ptr + segment + 1)
    place = _place(cu_seqlens, segment).to(tl.int64)
    keys = row[:, None] * BLOCK_K + col[None, :]
    values = row[:, None] * PADDED_V + at[None, :]
    square = row[:, None] * CHUNK + row[None, :]
    for i in range(tl.cdiv(length, CHUNK)):
        shared, own = (place + i) * H + head // (HV // H), (place + i) * HV + head
        total = tl.load(decay + own * CHUNK + row)
        whole = tl.load(decay + own * CHUNK + CHUNK - 1)
        old = state.to(kind)
        fresh = tl.load(u + own * (CHUNK * PADDED_V) + values).to(tl.float32)
        fresh -= tl.dot(tl.load(w + own * (CHUNK * BLOCK_K) + keys), old, input_precision="ieee")
        past = tl.dot(tl.load(q + shared * (CHUNK * BLOCK_K) + keys), old, input_precision="ieee")
        inner = tl.load(scores + own * (CHUNK * CHUNK) + square)
        answer = past * tl.exp(total)[:, None] + tl.dot(inner, fresh.to(kind), input_precision="ieee")
        k_t = tl.trans(tl.load(k + shared * (CHUNK * BLOCK_K) + keys))
        left = (fresh * tl.exp(whole - total)[:, None]).to(kind)
        state = state * tl.exp(whole) + tl.dot(k_t, left, input_precision="ieee")
        token = i * CHUNK + row
        inside = (token < length)[:, None] & (at < V)[None, :]
        out_at = out + ((start + token).to(tl.int64) * HV + head)[:, None] * V + at[None, :]
        tl.store(out_at, answer.to(out.dtype.element_ty), mask=inside)
        if export < last_export:  # noqa: SIM102 (a scalar `and` would load behind the list)
            if tl.load(exp_pos + export) == tl.minimum((i + 1) * CHUNK, length):
                target = tl.load(exp_dst + export).to(tl.int64)
                if target >= 0:
                    tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=in_state)
                export += 1
    final = tl.load(dst + segment).to(tl.int64)
    if final >= 0:
        tl.store(slot_at + final * slot_stride, state.to(pool.dtype.element_ty), mask=in_state)


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
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES_V: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
):
    """BLOCK_V value rows of one head of one sequence: the state is read once and written once."""
    pid = tl.program_id(0)
    head = (pid // TILES_V) % HV
    row = (pid // (TILES_V * HV)).to(tl.int64)
    col, at = tl.arange(0, BLOCK_K), (pid % TILES_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    inside = (at < V)[:, None] & (col < K)[None, :]
    slot_at = pool + head * (V * K) + at[:, None] * K + col[None, :]
    state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    if source >= 0:
        state = tl.load(slot_at + source * slot_stride, mask=inside, other=0.0).to(tl.float32)
    tokens = mixed + row * mixed_stride
    key_at = tokens + (head // (HV // H)) * K + col
    q = tl.load(key_at, mask=col < K, other=0.0).to(tl.float32)
    k = tl.load(key_at + H * K, mask=col < K, other=0.0).to(tl.float32)
    v = tl.load(tokens + 2 * H * K + head * V + at, mask=at < V, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
    raw_a, raw_b = tl.load(a + row * a_stride + head), tl.load(b + row * b_stride + head)
    g, beta = _gates(raw_a, raw_b, tl.load(a_log + head), tl.load(dt_bias + head), DOUBLE_BETA)
    decay = tl.exp(g)
    fresh = beta * (v - decay * tl.sum(state * k[None, :], axis=1))
    answer = decay * tl.sum(state * q[None, :], axis=1) + fresh * tl.sum(k * q, axis=0)
    tl.store(out + (row * HV + head) * V + at, answer.to(out.dtype.element_ty), mask=at < V)
    if target >= 0:
        state = decay * state + fresh[:, None] * k[None, :]
        tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)


def _check(mixed: Tensor, a: Tensor, b: Tensor, pool: Tensor) -> None:
    assert mixed.stride(1) == 1 and a.stride(1) == 1 and b.stride(1) == 1, "rows must be dense"
    assert pool[0].is_contiguous(), f"a slot must be dense; pool strides are {pool.stride()}"


def gdn_prefill(mixed: Tensor, a: Tensor, b: Tensor, params: GDNParams, pool: Tensor, index: SegmentIndex) -> Tensor:
    """The gated delta rule over segments: `mixed[T, mixed_dim]`, `a`, `b` `[T, HV]` -> `[T, HV, V]`.

    Reads and writes `pool[P, HV, V, K]` as `index` says. Scratch memory is about `T * (2 H K + HV (K + V + 64))`
    elements of the inputs' dtype.
    """
    _check(mixed, a, b, pool)
    shape = params.shape
    block_k = max(MIN_WIDTH, triton.next_power_of_2(shape.key_dim))
    padded_v = triton.cdiv(shape.value_dim, MIN_WIDTH) * MIN_WIDTH
    places = mixed.shape[0] // TILE + len(index)
    heads, value_heads = places * shape.num_k_heads, places * shape.num_v_heads
    q, k = mixed.new_empty(heads, TILE, block_k), mixed.new_empty(heads, TILE, block_k)
    w, u = mixed.new_empty(value_heads, TILE, block_k), mixed.new_empty(value_heads, TILE, padded_v)
    scores = mixed.new_empty(value_heads, TILE, TILE)
    decay = torch.empty(value_heads, TILE, dtype=torch.float32, device=mixed.device)
    out = mixed.new_empty(mixed.shape[0], shape.num_v_heads, shape.value_dim)
    sizes = _sizes(shape)
    wide = mixed.dtype == torch.float32
    _chunk_kernel[(index.tiles.shape[0] * shape.num_v_heads,)](
        mixed,
        a,
        b,
        params.A_log,
        params.dt_bias,
        index.tiles,
        index.cu_seqlens,
        q,
        k,
        w,
        u,
        scores,
        decay,
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        shape.key_dim**-0.5,
        **sizes,
        BLOCK_K=block_k,
        BLOCK_V=MIN_WIDTH,
        PADDED_V=padded_v,
        DOUBLE_BETA=shape.allow_neg_eigval,
        HALF=not wide,
        num_warps=8 if wide else 2,
    )
    _scan_kernel[(len(index) * shape.num_v_heads * (padded_v // SCAN_VALUES),)](
        q,
        k,
        w,
        u,
        scores,
        decay,
        pool,
        out,
        index.cu_seqlens,
        index.src,
        index.dst,
        index.exp_ptr,
        index.exp_pos,
        index.exp_dst,
        pool.stride(0),
        **sizes,
        BLOCK_K=block_k,
        BLOCK_V=SCAN_VALUES,
        PADDED_V=padded_v,
        num_warps=4,
        num_stages=1 if wide else 3,
    )
    return out


def _sizes(shape: GDNShape) -> dict[str, int]:
    return {"H": shape.num_k_heads, "HV": shape.num_v_heads, "K": shape.key_dim, "V": shape.value_dim}


def gdn_decode(mixed: Tensor, a: Tensor, b: Tensor, params: GDNParams, pool: Tensor, index: DecodeIndex) -> Tensor:
    """One recurrent step per row: `mixed[B, mixed_dim]`, `a`, `b` `[B, HV]` -> `[B, HV, V]`."""
    _check(mixed, a, b, pool)
    shape = params.shape
    block_v = min(DECODE_VALUES, triton.next_power_of_2(shape.value_dim))
    tiles_v = triton.cdiv(shape.value_dim, block_v)
    out = mixed.new_empty(mixed.shape[0], shape.num_v_heads, shape.value_dim)
    _decode_kernel[(mixed.shape[0] * shape.num_v_heads * tiles_v,)](
        mixed,
        a,
        b,
        params.A_log,
        params.dt_bias,
        pool,
        out,
        index.src,
        index.dst,
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        pool.stride(0),
        shape.key_dim**-0.5,
        **_sizes(shape),
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_V=block_v,
        TILES_V=tiles_v,
        DOUBLE_BETA=shape.allow_neg_eigval,
        num_warps=1,
        num_stages=1,
    )
    return out
