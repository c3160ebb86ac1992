"""C++ products with weights in FP8: against the widened weights, over layouts of scales, bit for bit in any batch."""

from __future__ import annotations

import pytest
import torch

from forkpoint.ops.linear.scaled import ScaledMatrix
from forkpoint.ops.parameters import RouteRule
from forkpoint.ops.select import torch_table
from tests.ops.cpu_table import cpp
from tests.ops.fp8_cases import LAYOUTS, scaled, widened

CPP, TILES, TORCH = cpp(tiles=False), cpp(tiles=True), torch_table()
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # as in test_cpu_linear
DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "width"), [(1, 70, 300), (12, 256, 128), (13, 100, 33), (200, 300, 400), (300, 70, 650)]
)
def test_products(rows: int, outputs: int, width: int, dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, width).to(dtype), torch.randn(outputs).to(dtype)
    weight = scaled(outputs, width, layout=layout, dtype=dtype)
    whole = CPP.linear(x, CPP.prepare_linear(weight, bias))
    want = x.double() @ widened(weight).T + bias.double()
    close(whole, want, dtype)
    tiles = TILES.linear(x, TILES.prepare_linear(weight, bias))
    close(tiles, want, dtype)
    assert rows > 12 or torch.equal(tiles, whole)  # weights are not rounded for few rows
    assert torch.equal(CPP.linear(x[-1:], CPP.prepare_linear(weight, bias)), whole[-1:])


def test_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    weight = ScaledMatrix(codes.view(256, 1).view(torch.float8_e4m3fn), torch.ones(256, 1), 1, 1, torch.float32)
    for rows in (1, 40):
        got = CPP.linear(torch.ones(rows, 1), CPP.prepare_linear(weight, None))
        assert torch.equal(got, weight.dense().T.expand(rows, -1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated: bool, layout: str) -> None:
    torch.manual_seed(0)
    gate_up = scaled(5, (1 + gated) * 72, 160, layout=layout, dtype=torch.float32)
    down = scaled(5, 160, 72, layout=layout, dtype=torch.float32)
    x, rule = torch.randn(60, 160), RouteRule(top_k=2, num_shared=1, shared="gated")
    weights, ids = TORCH.route(torch.randn(60, 5), rule)
    want = TORCH.experts(x.double(), TORCH.prepare_experts(widened(gate_up), widened(down)), weights, ids)
    close(CPP.experts(x, CPP.prepare_experts(gate_up, down), weights, ids), want, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_tiles(layout: str) -> None:
    torch.manual_seed(1)
    gate_up = scaled(3, 144, 160, layout=layout, dtype=torch.bfloat16)
    down = scaled(3, 160, 72, layout=layout, dtype=torch.bfloat16)
    x, rule = torch.randn(90, 160).bfloat16(), RouteRule(top_k=2, num_shared=1, shared="gated")
    weights, ids = TORCH.route(torch.randn(90, 3), rule)
    want = TORCH.experts(x.double(), TORCH.prepare_experts(widened(gate_up), widened(down)), weights, ids)
    for table in (TILES, cpp(deterministic=True, tiles=True)):
        packed = table.prepare_experts(gate_up, down)
        got = table.experts(x, packed, weights, ids)
        assert (
            got.double() - want
        ).abs().max() <= 2e-2 * want.abs().max()  # the sums between both products are rounded
        if table.deterministic:
            assert torch.equal(table.experts(x[:1], packed, weights[:1], ids[:1]), got[:1])
