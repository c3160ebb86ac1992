"""Rotary position embedding in torch (Su et al., 2021, with the two halves of the dims paired)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate the first `R` dims of `x[T, H, D]`: see `rope`."""
    return rotated(x, *cos_sin[positions].unsqueeze(1).chunk(2, dim=-1))


def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first `R` dims of `q[T, Hq, D]` and `k[T, Hk, D]`; new tensors.

    `cos_sin[max_len, R]` fp32 holds cos in its first half and sin in its second; `positions[T]` int64.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return rotated(q, cos, sin), rotated(k, cos, sin)
