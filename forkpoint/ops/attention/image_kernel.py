"""Attention of an image's patches in Triton: queries and keys are rotated in place, then tiles of queries attend.

A vendor's library would plan anew for every size of an image, which takes as long as the attention of several layers.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.attention import image
from forkpoint.ops.rounding import ceil_div, next_power_of_2

QUERIES, KEYS = 128, 64  # of a tile, and of a step over keys
PATCHES: Final = 4  # that a program rotates
# Elements. Rows must start at multiples of it, as those of published models do. Triton 3.6 copies other rows to shared
# memory without `cp.async`, and that code gave wrong values on an H200 with two steps or more over keys.
ALIGNED: Final = 16
NARROWEST: Final = 16  # dims of a matrix product
_LOG2_E: Final = 1.4426950408889634


@triton.jit
def rotate_kernel(
    q,
    k,
    cos_sin,
    num_patches,
    q_stride,
    k_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PATCHES: tl.constexpr,
):
    """Rotate PATCHES patches of q or of k in place. A pair is a dim of the first half and the same of the second."""
    HALF: tl.constexpr = HEAD_DIM // 2
    patches = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    heads, pairs = tl.arange(0, HEADS), tl.arange(0, PAIRS)
    inside = (patches < num_patches)[:, None] & (pairs < HALF)[None, :]
    at = patches[:, None] * HEAD_DIM + pairs[None, :]
    cos = tl.load(cos_sin + at, mask=inside, other=0.0)[:, None, :]
    sin = tl.load(cos_sin + at + HALF, mask=inside, other=0.0)[:, None, :]
    x, stride = q, q_stride
    if tl.program_id(1) == 1:
        x, stride = k, k_stride
    x += patches.to(tl.int64)[:, None, None] * stride + heads[None, :, None] * HEAD_DIM + pairs[None, None, :]
    inside = inside[:, None, :] & (heads < num_heads)[None, :, None]
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(x, (first * cos - second * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(x + HALF, (second * cos + first * sin).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _load(x, rows, stride, dims, HEAD_DIM: tl.constexpr):
    return tl.load(x + (rows * stride)[:, None] + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def image_kernel(
    q,
    k,
    v,
    out,
    num_patches,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute one head of a tile of queries: a softmax over all keys, step by step (Dao, 2022).

    A head has HEAD_DIM dims. A product needs a power of two, so the dims are cut into LOW and, unless it is 0, HIGH:
    72 are multiplied as 64 + 16, not as 128. `scale` is that of the scores times log2(e). Rows outside the image repeat
    its last patch: such keys get no weight, and such queries are not stored."""
    head = tl.program_id(1) * HEAD_DIM
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH if HIGH else 16)
    queries = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    rows = tl.minimum(queries, num_patches - 1)
    q_low = _load(q + head, rows, q_stride, low, HEAD_DIM)
    if HIGH:
        q_high = _load(q + head, rows, q_stride, high, HEAD_DIM)
        acc_high = tl.zeros((QUERIES, HIGH), tl.float32)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc_low = tl.zeros((QUERIES, LOW), tl.float32)
    for first in range(0, num_patches, KEYS):
        keys = first + tl.arange(0, KEYS)
        of_keys = tl.minimum(keys, num_patches - 1)
        k_low = _load(k + head, of_keys, k_stride, low, HEAD_DIM)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        if HIGH:
            k_high = _load(k + head, of_keys, k_stride, high, HEAD_DIM)
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
        scores += tl.where(keys < num_patches, 0.0, float("-inf"))[None, :]
        above = tl.maximum(most, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - above[:, None])
        fade = tl.exp2(most - above)
        total = total * fade + tl.sum(weights, 1)
        weights = weights.to(v.dtype.element_ty)
        v_low = _load(v + head, of_keys, v_stride, low, HEAD_DIM)
        acc_low = tl.dot(weights, v_low, acc_low * fade[:, None], input_precision="ieee")
        if HIGH:
            v_high = _load(v + head, of_keys, v_stride, high, HEAD_DIM)
            acc_high = tl.dot(weights, v_high, acc_high * fade[:, None], input_precision="ieee")
        most = above
    inside = (queries < num_patches)[:, None]
    out += head + queries.to(tl.int64)[:, None] * out_stride
    tl.store(out + low[None, :], (acc_low / total[:, None]).to(out.dtype.element_ty), mask=inside)
    if HIGH:
        inside &= (high < HEAD_DIM)[None, :]
        tl.store(out + high[None, :], (acc_high / total[:, None]).to(out.dtype.element_ty), mask=inside)


def image_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int, cos_sin: Tensor | None = None) -> Tensor:
    """Return each patch's attention to all patches: see `table.ImageAttention`. Rotates q and k in place."""
    num_patches, hidden = q.shape
    head_dim = hidden // num_heads
    if any(x.stride(0) % ALIGNED for x in (q, k, v)):
        return image.image_attention(q, k, v, num_heads, cos_sin)
    if cos_sin is not None:
        most = {"HEADS": next_power_of_2(num_heads), "PAIRS": next_power_of_2(head_dim // 2)}
        counts = (num_patches, q.stride(0), k.stride(0), num_heads)
        rotate_kernel[(ceil_div(num_patches, PATCHES), 2)](
            q, k, cos_sin.contiguous(), *counts, head_dim, **most, PATCHES=PATCHES
        )
    out = torch.empty(num_patches, hidden, dtype=q.dtype, device=q.device)
    low = max(NARROWEST, 1 << (head_dim.bit_length() - 1))
    high = max(NARROWEST, next_power_of_2(head_dim - low)) if head_dim > low else 0
    strides = (q.stride(0), k.stride(0), v.stride(0), out.stride(0))
    queries, keys, num_warps = (QUERIES, KEYS, 8) if q.element_size() == 2 else (QUERIES // 2, KEYS // 2, 4)
    sizes = {"HEAD_DIM": head_dim, "LOW": low, "HIGH": high, "QUERIES": queries, "KEYS": keys}
    image_kernel[(ceil_div(num_patches, queries), num_heads)](
        *(q, k, v, out, num_patches, *strides, head_dim**-0.5 * _LOG2_E), **sizes, num_warps=num_warps, num_stages=3
    )
    return out
