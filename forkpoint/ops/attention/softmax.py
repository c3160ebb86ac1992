"""The online softmax that attention kernels share: adding a block of keys to running sums, and joining sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)  # below any score, but finite, so that a row without keys never yields NaN
# Columns of 8-bit values at least. With fewer, Triton 3.6 multiplies the wrong widened columns on Hopper.
FEWEST_WIDENED = tl.constexpr(64)
PARTS = tl.constexpr(8)  # parts joined per step


@triton.jit
def add_scores(scores, q, keys_at, scales, D: tl.constexpr):
    """Return `scores` plus the products of query rows and keys of D dims; None counts as zeros.

    8-bit keys have `scales`. Memory after the last stored key may hold anything.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    at = tl.arange(0, BLOCK_D)
    keys = tl.load(keys_at) if BLOCK_D == D else tl.load(keys_at, mask=(at < D)[:, None], other=0.0)
    if scales is not None:
        keys = keys.to(q.dtype)  # exact conversion
    if scores is None:
        scores = tl.dot(q, keys, input_precision="ieee")
    else:
        scores = tl.dot(q, keys, scores, input_precision="ieee")
    if scales is not None:
        scores *= tl.load(scales + tl.arange(0, scores.shape[1]))[None, :]
    return scores


@triton.jit
def of_seen(scores, position, first_key, window, FIRST: tl.constexpr):
    """Return the scores, with -inf for keys from `first_key` on that rows at `position[M]` do not see.

    Rows see keys up to their own position, within `window` if there is one, and none before FIRST.
    """
    key = first_key + tl.arange(0, scores.shape[1])
    back = position[:, None] - key[None, :]
    seen = back >= 0
    if window is not None:
        seen = seen & (back < window)
    if FIRST:
        seen = seen & (key >= FIRST)[None, :]
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def shares(l_i, m_i, scores, scale):
    """Return (p, alpha, l_i, m_i) after a block of keys: their shares `2^(s - m_i)`, and the factor of older sums."""
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale)
    p = tl.exp2(scores * scale - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    return p, alpha, l_i * alpha + tl.sum(p, axis=1), m_new


@triton.jit
def add_values(
    acc,
    l_i,
    m_i,
    scores,
    scale,
    values_at,
    scales,
    first_key,
    kv_len,
    dtype: tl.constexpr,
    DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the running sums (acc, l_i, m_i) of query rows after a block of keys from `first_key` on.

    With scores s, `m_i` is the largest s, `l_i` the sum of 2^(s - m_i), and `acc` the sum of 2^(s - m_i) times the
    values. `scale` includes log2(e) and is positive. A block that a row does not see leaves its sums unchanged, bit for
    bit. Values are multiplied in `dtype`; 8-bit values have `scales`. In MASKED blocks, some values may never have been
    stored.
    """
    BLOCK_DV: tl.constexpr = acc.shape[1]
    key, at = tl.arange(0, scores.shape[1]), tl.arange(0, BLOCK_DV)
    p, alpha, l_i, m_new = shares(l_i, m_i, scores, scale)
    if MASKED:
        stored = first_key + key < kv_len
        values = tl.load(values_at, mask=stored[:, None] & (at < DV)[None, :], other=0.0)
    elif BLOCK_DV == DV:
        values = tl.load(values_at)
    else:
        values = tl.load(values_at, mask=(at < DV)[None, :], other=0.0)
    acc = acc * alpha[:, None]
    if scales is not None:
        values = values.to(dtype)
        p *= tl.load(scales + key, mask=first_key + key < kv_len, other=0.0)[None, :]
    acc += tl.dot(p.to(values.dtype), values, input_precision="ieee")
    return acc, l_i, m_new


@triton.jit
def join_sums(acc_ptr, l_ptr, m_ptr, first, count, stride, at, DV: tl.constexpr):
    """Return the sums (acc, l_i, m_i) of one query and head over `count` parts, in fp32; acc has columns `at`.

    The parts are entries `first`, `first + stride`, .. of `acc_ptr[., DV]`, `l_ptr[.]`, `m_ptr[.]`. Without parts acc
    and l_i are zero.
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
    return acc, l_i, m_i


@triton.jit
def join(acc_ptr, l_ptr, m_ptr, first, count, stride, at, DV: tl.constexpr):
    """Return columns `at` of the output of one query and head, joined from the parts of `join_sums`, in fp32.

    Without parts the output is zero.
    """
    acc, l_i, _ = join_sums(acc_ptr, l_ptr, m_ptr, first, count, stride, at, DV)
    return acc / tl.where(l_i > 0, l_i, 1.0)


@triton.jit
def gated(answer, gate):
    """Return `answer * sigmoid(gate)` in fp32, with the answer rounded as it would be stored without a gate."""
    return answer.to(gate.dtype).to(tl.float32) * sigmoid(gate.to(tl.float32))


def scratch(num_entries: int, value_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate (acc, l_i, m_i), uninitialised: fp32 sums `[num_entries, value_dim]`, and two fp32 numbers per row.

    l_i and m_i have up to three elements more than `num_entries`.
    """
    # Both start at multiples of 16 bytes, because kernels are specialised on that.
    l_i, m_i = torch.empty(2, -(-num_entries // 4) * 4, dtype=torch.float32, device=device)
    return torch.empty(num_entries, value_dim, dtype=torch.float32, device=device), l_i, m_i
