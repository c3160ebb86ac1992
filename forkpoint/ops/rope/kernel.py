"""Rotary position embedding in Triton, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x, cos, sin, head_stride, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):
    head, at = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (at < HALF)[None, :]
    low = x + head[:, None] * head_stride + at[None, :]
    high = low + HALF
    first = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(high, mask=inside, other=0.0).to(tl.float32)
    tl.store(low, (first * cos - second * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(high, (second * cos + first * sin).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _rope_kernel(
    q,
    k,
    cos_sin,
    positions,
    q_token,
    q_head,
    k_token,
    k_head,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    row = cos_sin + tl.load(positions + token) * (2 * HALF)
    cos = tl.load(row + at, mask=at < HALF, other=0.0)[None, :]
    sin = tl.load(row + HALF + at, mask=at < HALF, other=0.0)[None, :]
    _rotate(q + token * q_token, cos, sin, q_head, Q_HEADS, HALF, BLOCK_Q, BLOCK)
    _rotate(k + token * k_token, cos, sin, k_head, K_HEADS, HALF, BLOCK_K, BLOCK)


def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first `R` dims of `q[T, Hq, D]` and `k[T, Hk, D]` in place.

    `cos_sin[max_len, R]` fp32 contiguous holds cos in its first half and sin in its second; `positions[T]` int64.
    """
    assert q.stride(-1) == 1 and k.stride(-1) == 1 and cos_sin.is_contiguous()
    half = cos_sin.shape[1] // 2
    if q.shape[0]:
        _rope_kernel[(q.shape[0],)](
            q,
            k,
            cos_sin,
            positions,
            *q.stride()[:2],
            *k.stride()[:2],
            Q_HEADS=q.shape[1],
            K_HEADS=k.shape[1],
            HALF=half,
            BLOCK_Q=triton.next_power_of_2(q.shape[1]),
            BLOCK_K=triton.next_power_of_2(k.shape[1]),
            BLOCK=triton.next_power_of_2(half),
            num_warps=2,
        )
    return q, k
