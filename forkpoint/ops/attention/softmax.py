"""What the attention kernels share: one block of keys added to running sums, and parts of sums put together."""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.activation.kernel import sigmoid

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)  # below any score, and finite: a row that has seen nothing stays free of NaN


@triton.jit
def see(
    q,
    total,
    weight,
    top,
    key_at,
    value_at,
    first_key,
    position,
    kv_len,
    scale,
    window,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Add one block of keys to the running (weighted values, sum of weights, largest score) of query rows.

    `position[M]` are the rows' absolute positions, `scale` includes log2(e) and is positive. MASKED blocks hold keys
    that some row does not see, or that were never stored. A block that a row does not see leaves its sums as they are,
    bit for bit.
    """
    key, at, at_v = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    keys_at = key_at + key[None, :] * D + at[:, None]
    values_at = value_at + key[:, None] * DV + at_v[None, :]
    # Keys behind the last stored one may be anything: their scores are masked.
    keys = tl.load(keys_at) if BLOCK_D == D else tl.load(keys_at, mask=(at < D)[:, None], other=0.0)
    scores = tl.dot(q, keys, input_precision="ieee")
    if MASKED:
        back = position[:, None] - (first_key + key)[None, :]
        seen = back >= 0
        if HAS_WINDOW:
            seen = seen & (back < window)
        scores = tl.where(seen, scores, float("-inf"))
    high = tl.maximum(top, tl.max(scores, axis=1) * scale)
    parts = tl.exp2(scores * scale - high[:, None])
    shrink = tl.exp2(top - high)
    weight = weight * shrink + tl.sum(parts, axis=1)
    if MASKED:
        stored = first_key + key < kv_len
        values = tl.load(values_at, mask=stored[:, None] & (at_v < DV)[None, :], other=0.0)
    elif BLOCK_DV == DV:
        values = tl.load(values_at)
    else:
        values = tl.load(values_at, mask=(at_v < DV)[None, :], other=0.0)
    total = total * shrink[:, None]
    total += tl.dot(parts.to(values.dtype), values, input_precision="ieee")
    return total, weight, high


@triton.jit
def join(totals, weights, tops, first, count, stride, at, DV: tl.constexpr, PARTS: tl.constexpr):
    """Columns `at` of the answer of one query and head from `count` parts, PARTS at a time.

    Parts are entries `first`, `first + stride` .. of `totals[., DV]`, `weights[.]`, `tops[.]`. No parts give zeros.
    """
    total = tl.zeros(at.shape, tl.float32)
    weight, top = 0.0, -1.0e30
    for begin in range(0, count, PARTS):
        part = begin + tl.arange(0, PARTS)
        present = part < count
        entry = first + part * stride
        own = tl.load(tops + entry, mask=present, other=-1.0e30)
        own_weight = tl.load(weights + entry, mask=present, other=0.0)
        parts = tl.load(
            totals + entry[:, None] * DV + at[None, :], mask=present[:, None] & (at < DV)[None, :], other=0.0
        )
        high = tl.maximum(top, tl.max(own, axis=0))
        shrink, share = tl.exp2(top - high), tl.exp2(own - high)
        total = total * shrink + tl.sum(parts * share[:, None], axis=0)
        weight = weight * shrink + tl.sum(own_weight * share, axis=0)
        top = high
    return total / tl.where(weight > 0, weight, 1.0)


@triton.jit
def gated(answer, gate):
    """`answer * sigmoid(gate)` in fp32, of the answer as it would be stored without a gate."""
    return answer.to(gate.dtype).to(tl.float32) * sigmoid(gate.to(tl.float32))
