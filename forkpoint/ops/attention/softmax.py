"""What the attention kernels share: one block of keys added to running sums, and parts of sums put together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)  # below any score, and finite: a row that has seen nothing stays free of NaN


@triton.jit
def attend(
    q,
    acc,
    l_i,
    m_i,
    key_at,
    value_at,
    key_scales,
    value_scales,
    first_key,
    position,
    kv_len,
    scale,
    window,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    FIRST: tl.constexpr = 0,
    row=None,
    shared=None,
    shared_at=None,
    shared_row=None,
    P: tl.constexpr = 0,
):
    """One step of the online softmax: add a block of keys to (acc, l_i, m_i) of query rows.

    With scores s, `m_i` is the largest s, `l_i` the sum of 2^(s - m_i), `acc` the sum of 2^(s - m_i) times the values.
    `position[M]` are the rows' absolute positions, `scale` includes log2(e) and is positive. MASKED blocks hold keys
    that some row does not see, or that were never stored. A block that a row does not see leaves its sums as they
    are, bit for bit. Keys and values in 8 bits have their scales at `key_scales` and `value_scales` (else None).
    Rows of keys and of values lie side by side, or `row` apart. With `shared[M, P]` keys have P more dims, `shared_at`.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    BLOCK_DV: tl.constexpr = acc.shape[1]
    key, at, at_v = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    keys_at = key_at + key[None, :] * (D if row is None else row) + at[:, None]
    values_at = value_at + key[:, None] * (DV if row is None else row) + at_v[None, :]
    # Keys behind the last stored one may be anything: their scores are masked.
    keys = tl.load(keys_at) if BLOCK_D == D else tl.load(keys_at, mask=(at < D)[:, None], other=0.0)
    if key_scales is not None:
        keys = keys.to(q.dtype)  # exact
    scores = tl.dot(q, keys, input_precision="ieee")
    if shared is not None:
        more = tl.arange(0, shared.shape[1])
        common_at = shared_at + key[None, :] * shared_row + more[:, None]
        common = tl.load(common_at) if shared.shape[1] == P else tl.load(common_at, mask=(more < P)[:, None], other=0.0)
        scores = tl.dot(shared, common, scores, input_precision="ieee")
    if key_scales is not None:
        scores *= tl.load(key_scales + key)[None, :]
    if MASKED:
        back = position[:, None] - (first_key + key)[None, :]
        seen = back >= 0
        if window is not None:
            seen = seen & (back < window)
        if FIRST:
            seen = seen & (first_key + key >= FIRST)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale)
    p = tl.exp2(scores * scale - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    if MASKED:
        stored = first_key + key < kv_len
        values = tl.load(values_at, mask=stored[:, None] & (at_v < DV)[None, :], other=0.0)
    elif BLOCK_DV == DV:
        values = tl.load(values_at)
    else:
        values = tl.load(values_at, mask=(at_v < DV)[None, :], other=0.0)
    acc = acc * alpha[:, None]
    if value_scales is not None:
        values = values.to(q.dtype)
        p *= tl.load(value_scales + key, mask=first_key + key < kv_len, other=0.0)[None, :]
    acc += tl.dot(p.to(values.dtype), values, input_precision="ieee")
    return acc, l_i, m_new


@triton.jit
def join(acc_ptr, l_ptr, m_ptr, first, count, stride, at, DV: tl.constexpr, PARTS: tl.constexpr):
    """Columns `at` of the output of one query and head from `count` parts, PARTS at a time.

    Parts are entries `first`, `first + stride` .. of `acc_ptr[., DV]`, `l_ptr[.]`, `m_ptr[.]`. No parts give zeros.
    """
    acc = tl.zeros(at.shape, tl.float32)
    l_i, m_i = 0.0, -1.0e30
    for begin in range(0, count, PARTS):
        part = begin + tl.arange(0, PARTS)
        present = part < count
        entry = first + part * stride
        m_part = tl.load(m_ptr + entry, mask=present, other=-1.0e30)
        l_part = tl.load(l_ptr + entry, mask=present, other=0.0)
        acc_part = tl.load(
            acc_ptr + entry[:, None] * DV + at[None, :], mask=present[:, None] & (at < DV)[None, :], other=0.0
        )
        m_new = tl.maximum(m_i, tl.max(m_part, axis=0))
        alpha, share = tl.exp2(m_i - m_new), tl.exp2(m_part - m_new)
        acc = acc * alpha + tl.sum(acc_part * share[:, None], axis=0)
        l_i = l_i * alpha + tl.sum(l_part * share, axis=0)
        m_i = m_new
    return acc / tl.where(l_i > 0, l_i, 1.0)


@triton.jit
def gated(answer, gate):
    """`answer * sigmoid(gate)` in fp32, of the answer as it would be stored without a gate."""
    return answer.to(gate.dtype).to(tl.float32) * sigmoid(gate.to(tl.float32))


def scratch(num_entries: int, value_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(acc, l_i, m_i) of parts: `num_entries` rows of `value_dim` fp32 sums, and two fp32 numbers for each."""
    # Both begin at a multiple of 16 bytes, which kernels look at.
    l_i, m_i = torch.empty(2, -(-num_entries // 4) * 4, dtype=torch.float32, device=device)
    return torch.empty(num_entries, value_dim, dtype=torch.float32, device=device), l_i, m_i
