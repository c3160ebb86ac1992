"""Random matrices in 4 bits for tests of Triton kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forkpoint.ops.linear.packed import PackedMatrix, quantise_packed
from tests.ops.triton_cases import DEVICE

TOLERANCE = {torch.float32: 8e-6, torch.bfloat16: 2.4e-2}


def packed(*shape: int, group: int, floats: bool, dtype: torch.dtype, symmetric: bool = False) -> PackedMatrix:
    """Return random codes, scales, factors and, for integers, zero points: 8 if `symmetric`."""
    made = quantise_packed(torch.randn(shape), group)
    words = torch.randint(-(2**31), 2**31 - 1, made.words.shape, dtype=torch.int32)
    zeros = None if floats else made.zeros if symmetric else torch.randint_like(made.scales, 17, dtype=torch.uint8)
    if floats:
        scales = (torch.rand(made.scales.shape) * 400).to(torch.float8_e4m3fn)
        made = replace(made, scales=scales.view(torch.uint8))
    changed = replace(made, words=words, zeros=zeros, factors=made.factors * (torch.rand(made.factors.shape) + 0.5))
    moved = {name: getattr(changed, name).to(DEVICE) for name in ("words", "scales", "factors")}
    return replace(changed, **moved, zeros=None if zeros is None else zeros.to(DEVICE), dtype=dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, products: int = 1) -> None:
    """Compare with the exact result of so many products, one after another. The interpreter cuts bfloat16 off."""
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= products * TOLERANCE[dtype] * want.abs().max()
