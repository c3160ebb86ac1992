"""C++ products with weights in 4 bits: against the widened weights, and bit for bit in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forkpoint.ops.linear.packed import PackedMatrix, quantise_packed
from forkpoint.ops.parameters import RouteRule
from forkpoint.ops.select import torch_table
from tests.ops.cpu_table import cpp
from tests.ops.float_scales import every_scale, exact

CPP, TILES, TORCH = cpp(tiles=False), cpp(tiles=True), torch_table()
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # as in test_cpu_linear


def packed(*shape: int, group: int, floats: bool, dtype: torch.dtype) -> PackedMatrix:
    """Return random codes, scales (of either sign for integers), factors and, for integers, zero points."""
    made = quantise_packed(torch.randn(shape), group)
    words = torch.randint(-(2**31), 2**31 - 1, made.words.shape, dtype=torch.int32)
    scales = made.scales * torch.randn_like(made.scales).sign()
    if floats:
        scales = (torch.rand(scales.shape) * 400).to(torch.float8_e4m3fn).view(torch.uint8)
    zeros = None if floats else torch.randint_like(made.scales, 17, dtype=torch.uint8)
    factors = made.factors * (torch.rand(made.factors.shape) + 0.5)
    return replace(made, words=words, scales=scales, factors=factors, zeros=zeros, dtype=dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("floats", "group"), [(False, 8), (False, 32), (False, 360), (True, 16), (True, 72)])
@pytest.mark.parametrize("rows", [1, 12, 13, 40])
def test_products(rows: int, floats: bool, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    width = 288 if group < 300 else 360
    x, bias = torch.randn(rows, width).to(dtype), torch.randn(70).to(dtype)
    weight = packed(70, width, group=group, floats=floats, dtype=dtype)
    exact = x.double() @ replace(weight, dtype=torch.float64).dense().T + bias.double()
    whole = CPP.linear(x, CPP.prepare_linear(weight, bias))
    close(whole, exact, dtype)
    assert torch.equal(CPP.linear(x[-1:], CPP.prepare_linear(weight, bias)), whole[-1:])
    order = torch.randperm(width)
    moved = replace(weight, order=order)
    close(TILES.linear(torch.empty_like(x).index_copy_(1, order, x), TILES.prepare_linear(moved, bias)), exact, dtype)


def test_fixed_bits_with_tiles() -> None:
    fixed = cpp(True, tiles=True)
    for floats in (False, True):
        weight = packed(70, 200, group=40, floats=floats, dtype=torch.bfloat16)
        x, made = torch.randn(40, 200).bfloat16(), fixed.prepare_linear(weight, None)
        whole = fixed.linear(x, made)
        close(whole, x.double() @ weight.dense().double().T, torch.bfloat16)
        assert all(torch.equal(fixed.linear(x[:rows], made), whole[:rows]) for rows in (1, 3, 13))


def test_every_scale_of_floats() -> None:
    torch.manual_seed(2)
    weight = every_scale(40, 128, dtype=torch.float32)
    x, want = torch.eye(128), exact(weight)
    assert torch.equal(CPP.linear(x, CPP.prepare_linear(weight, None)).double(), want.T)  # widens a panel
    few = [CPP.linear(row, CPP.prepare_linear(weight, None)) for row in x.split(4)]
    assert torch.equal(torch.cat(few).double(), want.T)
    tiles = TILES.linear(x.bfloat16(), TILES.prepare_linear(replace(weight, dtype=torch.bfloat16), None))
    assert torch.equal(tiles.double(), want.T)


@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated: bool) -> None:
    torch.manual_seed(1)
    into = packed(5, 96 if gated else 48, 64, group=32, floats=False, dtype=torch.float32)
    down = packed(5, 64, 48, group=16, floats=True, dtype=torch.float32)
    x = torch.randn(40, 64)
    weights, ids = TORCH.route(torch.randn(40, 5), RouteRule(top_k=2, num_shared=1, shared="gated"))
    whole = CPP.experts(x, CPP.prepare_experts(into, down), weights, ids)
    close(whole, TORCH.experts(x, TORCH.prepare_experts(into, down), weights, ids).double(), torch.float32)
    assert torch.equal(CPP.experts(x[:1], CPP.prepare_experts(into, down), weights[:1], ids[:1]), whole[:1])
