"""The write of rows to their places in blocks, in Triton (`OpTable.store_rows`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap


@triton.jit
def _store_kernel(
    x,
    cache,
    key_places,
    x_token,
    x_head,
    block_stride,
    head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store one head of one token. Slot -1 stores nothing."""
    await_inputs(OVERLAP)
    token, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    key_place = tl.load(key_places + token)
    if key_place >= 0:
        at = tl.arange(0, triton.next_power_of_2(D))
        value = tl.load(x + token * x_token + head * x_head + at, mask=at < D, other=0.0)
        place = cache + key_place // BLOCK * block_stride + head * head_stride + key_place % BLOCK * D
        tl.store(place + at, value.to(cache.dtype.element_ty), mask=at < D)


def store_rows(x: Tensor, cache: Tensor, key_places: Tensor) -> None:
    """Store `x[T, H, D]` in `cache[P, H, B, D]`, a strided view of the arena."""
    assert x.stride(2) == 1 and cache[0, 0].is_contiguous(), "rows must be dense"
    tokens, heads, dim = x.shape
    if tokens:
        strides, sizes = (*x.stride()[:2], *cache.stride()[:2]), {"HEADS": heads, "D": dim, "BLOCK": cache.shape[2]}
        _store_kernel[(tokens * heads,)](
            x, cache, key_places, *strides, **sizes, **overlap(x.device, tokens), num_warps=1
        )
