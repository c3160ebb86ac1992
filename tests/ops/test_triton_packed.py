"""Triton products with weights in 4 bits, against the widened weights, and rows on their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forkpoint.ops.linear.device_linear import DeviceLinear
from forkpoint.ops.linear.packed import FourBitExperts, FourBitLinear
from forkpoint.ops.linear.packed_kernel import multiply_packed, widen_packed
from forkpoint.ops.moe import device_experts
from forkpoint.ops.moe.device_experts import DeviceExperts
from forkpoint.ops.parameters import GateLimits, RouteRule
from forkpoint.ops.select import torch_table
from tests.ops.float_scales import every_scale, exact
from tests.ops.packed_cases import TOLERANCE, close, packed
from tests.ops.triton_cases import DEVICE, triton_ops

OURS, TORCH = triton_ops(), torch_table()


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


def test_every_scale_of_floats() -> None:
    torch.manual_seed(2)
    weight = every_scale(32, 128, dtype=torch.bfloat16, device=DEVICE)
    want, x = exact(weight), torch.eye(128).to(DEVICE, torch.bfloat16)
    assert torch.equal(widen_packed(weight).double(), want)
    assert torch.equal(multiply_packed(x, weight).double(), want.T)


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
