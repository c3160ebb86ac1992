"""One step of a recurrence in Triton; reference.py has the formulas."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.metadata import DecodeIndex
from forkpoint.ops.parameters import RecurrenceParams
from forkpoint.ops.recurrence.gates import L2_EPS, checked, decay, key_block, modes, sizes, weight
from forkpoint.ops.recurrence.key_kernel import key_decode


@triton.jit
def token_inputs(token, key_head, head, col, at, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """(q, k, v) of a head in fp32, as they are in `mixed`."""
    key_at = token + key_head * K + col
    q = tl.load(key_at, mask=col < K, other=0.0).to(tl.float32)
    k = tl.load(key_at + H * K, mask=col < K, other=0.0).to(tl.float32)
    v = tl.load(token + 2 * H * K + head * V + at, mask=at < V, other=0.0).to(tl.float32)
    return q, k, v


@triton.jit
def normed(q, k, scale):
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
    return q, k


@triton.jit
def read_state(
    state,
    q,
    k,
    v,
    raw_a,
    raw_b,
    a_log,
    dt_bias,
    skip,
    head,
    DELTA: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """A token's answer, and what the state is then updated by: (answer, update, decay)."""
    g, step = decay(raw_a, tl.load(a_log + head), tl.load(dt_bias + head), LOW, HIGH)
    if DELTA:
        beta = weight(raw_b, DOUBLE_BETA)
    kept = tl.exp(g)
    fresh = beta * (v - kept * tl.sum(state * k[None, :], axis=1)) if DELTA else step * v
    answer = kept * tl.sum(state * q[None, :], axis=1) + fresh * tl.sum(k * q, axis=0)
    if skip is not None:
        answer += tl.load(skip + head) * v
    return answer, fresh, kept


@triton.jit
def update(state, kept, fresh, k):
    return kept * state + fresh[:, None] * k[None, :]


@triton.jit
def _decode_kernel(
    mixed,
    a,
    b,
    a_log,
    dt_bias,
    skip,
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
    DELTA: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_V value rows of one head of one sequence: the state is read once and written once."""
    await_inputs(OVERLAP)
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
    token = mixed + row * mixed_stride
    q, k, v = token_inputs(token, head // (HV // H), head, col, at, H, K, V)
    if DELTA:
        q, k = normed(q, k, scale)
    raw_a = tl.load(a + row * a_stride + head)
    raw_b = tl.load(b + row * b_stride + head)
    answer, fresh, kept = read_state(
        state, q, k, v, raw_a, raw_b, a_log, dt_bias, skip, head, DELTA, DOUBLE_BETA, LOW, HIGH
    )
    tl.store(out + (row * HV + head) * V + at, answer.to(out.dtype.element_ty), mask=at < V)
    if target >= 0:
        state = update(state, kept, fresh, k)
        tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)


def recurrence_decode(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    params: RecurrenceParams,
    pool: Tensor,
    index: DecodeIndex,
    out: Tensor | None = None,
) -> Tensor:
    """One recurrent step per row: `mixed[B, mixed_dim]`, `a`, `b` `[B, HV]` -> `[B, HV, V]`, in `out` if given."""
    shape = params.spec
    if shape.per_key:
        return key_decode(mixed, a, b, params, pool, index, out)
    b, out = checked(shape, mixed, a, b, pool, out)
    block_v = min(launch_table(pool.device).state_values, triton.next_power_of_2(shape.value_dim))
    tiles_v = triton.cdiv(shape.value_dim, block_v)
    _decode_kernel[(mixed.shape[0] * shape.num_v_heads * tiles_v,)](
        mixed,
        a,
        b,
        params.A_log,
        params.dt_bias,
        params.D,
        pool,
        out,
        index.src,
        index.dst,
        *(x.stride(0) for x in (mixed, a, b)),
        pool.stride(0),
        shape.key_dim**-0.5,
        **sizes(shape),
        BLOCK_K=key_block(shape),
        BLOCK_V=block_v,
        TILES_V=tiles_v,
        **modes(shape),
        **overlap(mixed.device, mixed.shape[0]),
        num_warps=1,
        num_stages=1,
    )
    return out
