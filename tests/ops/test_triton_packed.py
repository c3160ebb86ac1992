"""Triton products with weights in 4 bits, against the widened weights, and rows on their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forkpoint.ops.linear.device_linear import DeviceLinear
from forkpoint.ops.linear.packed import FourBitExperts, FourBitLinear, PackedMatrix, quantise_packed
from forkpoint.ops.linear.packed_kernel import widen_packed
from forkpoint.ops.moe import device_experts
from forkpoint.ops.moe.device_experts import DeviceExperts
from forkpoint.ops.parameters import GateLimits, RouteRule
from forkpoint.ops.select import torch_table
from tests.ops.triton_cases import DEVICE, triton_ops

OURS, TORCH = triton_ops(), torch_table()
TOLERANCE = {torch.float32: 8e-6, torch.bfloat16: 2.4e-2}


def packed(*shape: int, group: int, floats: bool, dtype: torch.dtype) -> PackedMatrix:
    """Return random codes, scales, factors and, for integers, zero points."""
    made = quantise_packed(torch.randn(shape), group)
    words = torch.randint(-(2**31), 2**31 - 1, made.words.shape, dtype=torch.int32)
    zeros = None if floats else torch.randint_like(made.scales, 17, dtype=torch.uint8)
    if floats:
        made = replace(made, scales=(torch.rand(made.scales.shape) * 400).to(torch.float8_e4m3fn).half())
    changed = replace(made, words=words, zeros=zeros, factors=made.factors * (torch.rand(made.factors.shape) + 0.5))
    moved = {name: getattr(changed, name).to(DEVICE) for name in ("words", "scales", "factors")}
    return replace(changed, **moved, zeros=None if zeros is None else zeros.to(DEVICE), dtype=dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("floats", "group"), [(False, 32), (False, 144), (True, 16)])
def test_products(floats: bool, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(group)
    weight, bias = packed(72, 288, group=group, floats=floats, dtype=dtype), torch.randn(72).to(DEVICE, dtype)
    close(widen_packed(weight), weight.dense(), dtype)
    fixed = DeviceLinear(True, OURS.silu_mul)
    x = torch.randn(20, 288).to(DEVICE, dtype)
    exact = x.double() @ replace(weight, dtype=torch.float64).dense().T
    made = fixed.prepare_linear(weight, bias)
    assert isinstance(made, FourBitLinear)
    whole = fixed.linear(x, made)
    close(whole, exact + bias, dtype)
    close(OURS.linear(x, OURS.prepare_linear(weight, None)), exact, dtype)
    order = torch.tensor([7, 2, 19]).to(DEVICE)
    assert torch.equal(fixed.linear(x[order], made), whole[order])
    columns = torch.randperm(288).to(DEVICE)
    moved = OURS.prepare_linear(replace(weight, order=columns), None)
    close(OURS.linear(torch.empty_like(x).index_copy_(1, columns, x), moved), exact, dtype)


@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    size = 2 * 48 if gated else 48
    into = packed(5, size, 64, group=32, floats=False, dtype=torch.float32)
    down = packed(5, 64, 48, group=16, floats=True, dtype=torch.float32)
    x = torch.randn(9, 64).to(DEVICE)
    weights, ids = TORCH.route(torch.randn(9, 5).to(DEVICE), RouteRule(top_k=2, num_shared=1, shared="gated"))
    made = DeviceExperts(False).prepare(into, down)
    assert isinstance(made, FourBitExperts) and made.gated == gated
    wanted = {}
    cases = (None, GateLimits(0.5, 0.3)) if gated else (None,)
    for limits in cases:
        wanted[limits] = TORCH.experts(x, TORCH.prepare_experts(into, down), weights, ids, limits)
        close(OURS.experts(x, made, weights, ids, limits=limits), wanted[limits], torch.float32)
    monkeypatch.setattr(device_experts, "WIDENED_ROWS", 1)  # as for a long prompt
    for limits in cases:
        close(DeviceExperts(False)(x, made, weights, ids, limits=limits), wanted[limits], torch.float32)
