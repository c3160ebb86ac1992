"""The chunked gated delta rule in Triton; reference.py has the formulas.

Two launches. The first works on all 64-token chunks at once: gates, norms of q and k, the inverse of the chunk's
triangular system, its scores. The second walks each segment's chunks in order, with the fp32 state in registers, and
stores the state to slots where the index says so. There everything is held transposed, `[V, tokens]`, so that each
product's left operand is the result of the one before and stays in registers. Products take bfloat16 operands for
bfloat16 inputs and fp32 operands otherwise; every sum is fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.gated_delta.gates import L2_EPS, check_layout, gates, sizes
from forkpoint.ops.metadata import TILE, SegmentIndex
from forkpoint.ops.table import GDNParams

CHUNK = tl.constexpr(TILE)
SUB = tl.constexpr(16)  # rows of the diagonal blocks that are inverted one row at a time
BLOCKS = tl.constexpr(TILE // 16)
# Of what a chunk's two launches share, per token: the factors of `S k`, of `S q`, of k in the state's update, and of
# the state itself from the chunk's start.
GAINS = tl.constexpr(4)
MIN_WIDTH = 64  # of a tile of keys or values


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
    DOUBLE_BETA: tl.constexpr,
    HALF: tl.constexpr,
):
    """One chunk of one value head. Rows and columns behind a segment's end get zeros."""
    pid = tl.program_id(0)
    tile, head = pid // HV, pid % HV
    segment, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if segment < 0:
        return
    start = tl.load(cu_seqlens + segment) + offset
    count = tl.load(cu_seqlens + segment + 1) - start
    entry = (_place(cu_seqlens, segment) + offset // CHUNK).to(tl.int64) * HV + head
    row, col = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token = start.to(tl.int64) + row
    present = row < count
    raw_a = tl.load(a + token * a_stride + head, mask=present, other=0.0)
    raw_b = tl.load(b + token * b_stride + head, mask=present, other=0.0)
    inside = present[:, None] & (col < K)[None, :]
    q_at = mixed + token[:, None] * mixed_stride + (head // (HV // H) * K + col)[None, :]
    k = tl.load(q_at + H * K, mask=inside, other=0.0)
    q = tl.load(q_at, mask=inside, other=0.0)
    g, beta = gates(raw_a, raw_b, tl.load(a_log + head), tl.load(dt_bias + head), DOUBLE_BETA)
    g = tl.where(present, g, 0.0)
    beta = tl.where(present, beta, 0.0)
    total = tl.cumsum(g, axis=0)
    last = tl.sum(tl.where(row == CHUNK - 1, total, 0.0), axis=0)
    wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(wide_k * wide_k, axis=1) + L2_EPS)
    q_norm = tl.rsqrt(tl.sum(wide_q * wide_q, axis=1) + L2_EPS) * scale
    grown = tl.exp(total)
    gain = gains + entry * (GAINS * CHUNK) + row
    tl.store(gain, grown * k_norm)
    tl.store(gain + CHUNK, grown * q_norm)
    tl.store(gain + 2 * CHUNK, tl.exp(last - total) * k_norm)
    tl.store(gain + 3 * CHUNK, grown)
    square = entry * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    steps = tl.where(row[:, None] >= row[None, :], total[:, None] - total[None, :], float("-inf"))
    decays = tl.exp(steps) * k_norm[None, :]
    k_t = tl.trans(k)
    system = tl.dot(k, k_t, input_precision="ieee") * decays * (beta * k_norm)[:, None]
    score = tl.dot(q, k_t, input_precision="ieee") * decays * q_norm[:, None]
    tl.store(scores + square, score.to(scores.dtype.element_ty))
    inverse = _unit_lower_inverse(tl.where(row[:, None] > row[None, :], system, 0.0), HALF)
    tl.store(systems + square, (inverse * beta[None, :]).to(systems.dtype.element_ty))


@triton.jit
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
    exp_ptr,
    exp_pos,
    exp_dst,
    mixed_stride,
    slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES_V: tl.constexpr,
):
    """BLOCK_V value rows of one head's state, through all chunks of one segment."""
    pid = tl.program_id(0)
    head = (pid // TILES_V) % HV
    segment = pid // (TILES_V * HV)
    kind = systems.dtype.element_ty
    row, col, at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), (pid % TILES_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    in_state = (at < V)[:, None] & (col < K)[None, :]
    slot_at = pool + head * (V * K) + at[:, None] * K + col[None, :]
    state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    source = tl.load(src + segment).to(tl.int64)
    if source >= 0:
        state = tl.load(slot_at + source * slot_stride, mask=in_state, other=0.0).to(tl.float32)
    export, last_export = tl.load(exp_ptr + segment), tl.load(exp_ptr + segment + 1)
    entry = _place(cu_seqlens, segment).to(tl.int64) * HV + head
    keys = mixed + start.to(tl.int64) * mixed_stride + (head // (HV // H) * K + col)[None, :]
    values = mixed + start.to(tl.int64) * mixed_stride + (2 * H * K + head * V + at)[:, None]
    out_at = out + (start.to(tl.int64) * HV + head) * V + at[:, None]
    square = row[:, None] * CHUNK + row[None, :]
    for i in range(tl.cdiv(length, CHUNK)):
        token = i * CHUNK + row
        present = token < length
        place = token.to(tl.int64)
        in_keys = present[:, None] & (col < K)[None, :]
        in_values = (at < V)[:, None] & present[None, :]
        own = entry + i * HV
        gain = gains + own * (GAINS * CHUNK) + row
        k = tl.load(keys + H * K + place[:, None] * mixed_stride, mask=in_keys, other=0.0)
        v = tl.load(values + place[None, :] * mixed_stride, mask=in_values, other=0.0)
        system = tl.load(systems + own * (CHUNK * CHUNK) + square)
        q = tl.load(keys + place[:, None] * mixed_stride, mask=in_keys, other=0.0)
        score = tl.load(scores + own * (CHUNK * CHUNK) + square)
        whole = tl.load(gains + own * (GAINS * CHUNK) + GAINS * CHUNK - 1)
        old = state.to(kind)
        rest = v.to(tl.float32) - tl.dot(old, tl.trans(k), input_precision="ieee") * tl.load(gain)[None, :]
        fresh = tl.dot(rest.to(kind), tl.trans(system), input_precision="ieee")
        answer = tl.dot(old, tl.trans(q), input_precision="ieee") * tl.load(gain + CHUNK)[None, :]
        left = (fresh * tl.load(gain + 2 * CHUNK)[None, :]).to(kind)
        state = state * whole + tl.dot(left, k, input_precision="ieee")
        answer += tl.dot(fresh.to(kind), tl.trans(score), input_precision="ieee")
        tl.store(out_at + place[None, :] * (HV * V), answer.to(out.dtype.element_ty), mask=in_values)
        if export < last_export:  # noqa: SIM102 (a scalar `and` would load behind the list)
            if tl.load(exp_pos + export) == tl.minimum((i + 1) * CHUNK, length):
                target = tl.load(exp_dst + export).to(tl.int64)
                if target >= 0:
                    tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=in_state)
                export += 1
    final = tl.load(dst + segment).to(tl.int64)
    if final >= 0:
        tl.store(slot_at + final * slot_stride, state.to(pool.dtype.element_ty), mask=in_state)


def gdn_prefill(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    pool: Tensor,
    index: SegmentIndex,
    out: Tensor | None = None,
) -> Tensor:
    """The gated delta rule over segments: `mixed[T, mixed_dim]`, `a`, `b` `[T, HV]` -> `[T, HV, V]`, in `out` if given.

    Reads and writes `pool[P, HV, V, K]` as `index` says. Scratch memory is about `T * HV * 144` elements of the
    inputs' dtype.
    """
    check_layout(mixed, a, b, pool)
    assert index.tiles is not None, "kernels need the index's tiles"
    shape = params.shape
    block_k = max(MIN_WIDTH, triton.next_power_of_2(shape.key_dim))
    tiles_v = triton.cdiv(shape.value_dim, MIN_WIDTH)
    segments = index.src.shape[0]
    entries = (mixed.shape[0] // TILE + segments) * shape.num_v_heads
    systems, scores = mixed.new_empty(entries, TILE, TILE), mixed.new_empty(entries, TILE, TILE)
    gains = torch.empty(entries, GAINS.value, TILE, dtype=torch.float32, device=mixed.device)
    if out is None:
        out = mixed.new_empty(mixed.shape[0], shape.num_v_heads, shape.value_dim)
    assert out.is_contiguous(), "the result must be dense"
    wide = mixed.dtype == torch.float32
    _chunk_kernel[(index.tiles.shape[0] * shape.num_v_heads,)](
        mixed,
        a,
        b,
        params.A_log,
        params.dt_bias,
        index.tiles,
        index.cu_seqlens,
        systems,
        scores,
        gains,
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        shape.key_dim**-0.5,
        **sizes(shape),
        BLOCK_K=block_k,
        DOUBLE_BETA=shape.allow_neg_eigval,
        HALF=not wide,
        num_warps=8 if wide else 4,
    )
    _scan_kernel[(segments * shape.num_v_heads * tiles_v,)](
        mixed,
        systems,
        scores,
        gains,
        pool,
        out,
        index.cu_seqlens,
        index.src,
        index.dst,
        index.exp_ptr,
        index.exp_pos,
        index.exp_dst,
        mixed.stride(0),
        pool.stride(0),
        **sizes(shape),
        BLOCK_K=block_k,
        BLOCK_V=MIN_WIDTH,
        TILES_V=tiles_v,
        num_warps=4,
        num_stages=1 if wide else 2,
    )
    return out
