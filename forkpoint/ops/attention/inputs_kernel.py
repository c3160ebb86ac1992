"""Norm and rotation of queries and keys, and the write of keys and values, in one Triton launch.

Normalised heads and rotated heads are rounded to the inputs' dtype, as separate operators would round them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.linear import scaled
from forkpoint.ops.parameters import KVScales, QKNorm

FP8_MAX = tl.constexpr(scaled.FP8_MAX)
LEAST_AMAX = tl.constexpr(scaled.LEAST_AMAX)


@triton.jit
def _normed(x_at, weight_at, mask, inside, scale, NORM: tl.constexpr):
    """Load columns of heads, multiply them by `scale[rows]` and their weights, and round; return fp32."""
    x = tl.load(x_at, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    if NORM:
        wide = wide * scale[:, None] * tl.load(weight_at, mask=inside, other=0.0)[None, :]
        wide = wide.to(x.dtype).to(tl.float32)
    return wide


@triton.jit
def _heads(
    x_at,
    out_at,
    scale_at,
    weight,
    angle,
    eps,
    present,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normalise rows `x_at[rows, 1]`, rotate their first 2 * HALF dims, and store them to rows `out_at[rows, 1]`.

    With `scale_at` there is one row; it is divided by its FP8 scale, which is stored there."""
    dtype: tl.constexpr = out_at.dtype.element_ty
    given: tl.constexpr = x_at.dtype.element_ty
    at, low = tl.arange(0, triton.next_power_of_2(D)), tl.arange(0, triton.next_power_of_2(HALF) if HALF > 0 else 1)
    mask, mask_low = present[:, None] & (at < D)[None, :], present[:, None] & (low < HALF)[None, :]
    rest = mask & (at >= 2 * HALF)[None, :]
    scale = tl.zeros(present.shape, tl.float32)
    largest = 0.0
    if NORM:
        wide = tl.load(x_at + at[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)
    if 2 * HALF < D:
        value = _normed(x_at + at[None, :], weight + at, mask, at < D, scale, NORM)
        if scale_at is not None:
            largest = tl.max(tl.where(rest, tl.abs(value), 0.0))
    if HALF > 0:
        cos = tl.load(angle + low, mask=low < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF + low, mask=low < HALF, other=0.0)[None, :]
        first = _normed(x_at + low[None, :], weight + low, mask_low, low < HALF, scale, NORM)
        second = _normed(x_at + HALF + low[None, :], weight + HALF + low, mask_low, low < HALF, scale, NORM)
        first, second = first * cos - second * sin, second * cos + first * sin
        if scale_at is not None:
            first, second = first.to(given).to(tl.float32), second.to(given).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(first), tl.abs(second))))
    if scale_at is not None:
        factor = _fp8_scale(largest)
        tl.store(scale_at, factor)
    if 2 * HALF < D:
        tl.store(out_at + at[None, :], (value if scale_at is None else value / factor).to(dtype), mask=rest)
    if HALF > 0:
        if scale_at is not None:
            first, second = first / factor, second / factor
        tl.store(out_at + low[None, :], first.to(dtype), mask=mask_low)
        tl.store(out_at + HALF + low[None, :], second.to(dtype), mask=mask_low)


@triton.jit
def _fp8_scale(largest):
    """Return the scale that maps the largest magnitude to FP8_MAX."""
    return tl.maximum(largest, LEAST_AMAX) / FP8_MAX


@triton.jit
def _inputs_kernel(
    q,
    k,
    v,
    out,
    q_weight,
    k_weight,
    cos_sin,
    positions,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    key_places,
    eps,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    k_block,
    kc_head,
    v_block,
    vc_head,
    scale_block,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute and store the query heads of one key head of one token, or that key head and its value.

    HALF is 0 without rotation. Slot -1 stores no key and value.
    """
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    token, unit = (pid // (2 * HEADS)).to(tl.int64), pid % (2 * HEADS)
    angle = cos_sin + tl.load(positions + token) * (2 * HALF)
    if unit < HEADS:
        row = tl.arange(0, triton.next_power_of_2(GROUP))
        head = unit * GROUP + row
        x_at = q + token * q_token + (head * q_head)[:, None]
        out_at = out + token * (HEADS * GROUP * D) + (head * D)[:, None]
        _heads(x_at, out_at, None, q_weight, angle, eps, row < GROUP, D, HALF, NORM)
    else:
        key_place = tl.load(key_places + token)
        if key_place >= 0:
            head = unit - HEADS
            block, offset, row = key_place // BLOCK, key_place % BLOCK, tl.arange(0, 1)
            scale_at = k_scales
            if k_scales is not None:
                scale_at = k_scales + block * scale_block + head * BLOCK + offset
            x_at = k + token * k_token + head * k_head + row[:, None]
            out_at = k_cache + block * k_block + head * kc_head + offset * D + row[:, None]
            _heads(x_at, out_at, scale_at, k_weight, angle, eps, row < 1, D, HALF, NORM)
            at = tl.arange(0, triton.next_power_of_2(DV))
            value = tl.load(v + token * v_token + head * v_head + at, mask=at < DV, other=0.0)
            if k_scales is not None:
                value = value.to(tl.float32)
                scale = _fp8_scale(tl.max(tl.abs(value), axis=0))
                tl.store(v_scales + block * scale_block + head * BLOCK + offset, scale)
                value = value / scale
            place = v_cache + block * v_block + head * vc_head + offset * DV + at
            tl.store(place, value.to(v_cache.dtype.element_ty), mask=at < DV)


def qk_norm_rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: QKNorm | None,
    cos_sin: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key_places: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    """Normalise and rotate q and k, store k and v in the caches, return q (`table.QKNormRopeWrite`).

    The inputs may be views of one projection's rows.
    """
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and (cos_sin is None or cos_sin.is_contiguous())
    assert k_cache[0, 0].is_contiguous() and v_cache[0, 0].is_contiguous(), "a head's share of a block is dense"
    assert scales is None or scales.fit(k_cache), "scales lie in their blocks, one for each key"
    num_tokens, heads, dim = k.shape
    half, group = 0 if cos_sin is None else cos_sin.shape[1] // 2, q.shape[1] // heads
    out = q.new_empty(q.shape)
    if num_tokens:
        weights = (q, k) if norm is None else (norm.q_weight, norm.k_weight)
        factors = (None, None) if scales is None else (scales.k, scales.v)
        angles = q if cos_sin is None else cos_sin
        operands = (q, k, v, out, *weights, angles, positions, k_cache, v_cache, *factors, key_places)
        strides = [stride for x in (q, k, v, k_cache, v_cache) for stride in x.stride()[:2]]
        sizes = {"HEADS": heads, "GROUP": group, "D": dim, "DV": v.shape[2], "HALF": half, "BLOCK": k_cache.shape[2]}
        eps, scale_block = 0.0 if norm is None else norm.eps, None if scales is None else scales.k.stride(0)
        options = {"NORM": norm is not None, "num_warps": 2, **overlap(q.device, num_tokens)}
        _inputs_kernel[(num_tokens * 2 * heads,)](*operands, eps, *strides, scale_block, **sizes, **options)
    return out
