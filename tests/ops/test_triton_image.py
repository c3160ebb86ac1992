"""Triton attention of an image's patches, against torch."""

from __future__ import annotations

import pytest
import torch

from forkpoint.ops.select import torch_table
from tests.ops.triton_cases import DEVICE, triton_ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.4e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 72), (3, 72), (2, 64), (5, 16), (4, 100)])
@pytest.mark.parametrize("num_patches", [4, 130])
def test_patches_attend_to_all(num_patches: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    hidden = num_heads * head_dim
    qkv = torch.randn(num_patches, 3 * hidden).to(DEVICE, dtype)
    angles = torch.randn(num_patches, head_dim // 2)
    for cos_sin in (None, torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE)):
        want = torch_table().image_attention(*qkv.double().chunk(3, 1), num_heads, cos_sin)
        got = triton_ops().image_attention(*qkv.clone().chunk(3, 1), num_heads, cos_sin)
        assert got.dtype == dtype and (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_sum_and_its_layer_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, added = (torch.randn(5, 72).to(DEVICE, dtype) for _ in range(2))
    weight, bias = (torch.randn(72).to(DEVICE, dtype) for _ in range(2))
    got, total = triton_ops().add_layer_norm(x, added, weight, bias, 1e-6)
    want, exact = torch_table().add_layer_norm(*(each.double() for each in (x, added, weight, bias)), 1e-6)
    for own, other in ((got, want), (total, exact)):
        assert own.dtype == dtype and (own.double() - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()
