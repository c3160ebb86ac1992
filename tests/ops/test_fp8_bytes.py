"""Triton products with weights in FP8 that come as bytes, for devices without 8-bit floats: as of those that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.scaled import CODES, ScaledExperts, ScaledLinear, ScaledMatrix
from forkpoint.ops.linear.widen_kernel import widen
from forkpoint.ops.parameters import RouteRule
from forkpoint.ops.select import torch_table
from tests.ops.fp8_cases import LAYOUTS, scaled, widened
from tests.ops.triton_cases import DEVICE, ON_GPU, relative_error, triton_ops

OURS, TORCH = triton_ops(), torch_table()
WIDTH = 160  # the last step of K is not whole


def as_bytes(matrix: ScaledMatrix) -> ScaledMatrix:
    return replace(matrix, codes=matrix.codes.view(torch.uint8))


def close(got: Tensor, want: Tensor) -> None:
    assert (got.double() - want).abs().max() <= 2.4e-2 * want.abs().max()


def test_every_code_is_widened_exactly() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(CODES)
    finite = values[values.float().isfinite()].repeat(64)[: 126 * 128].view(126, 128).to(DEVICE)
    matrix = as_bytes(ScaledMatrix(finite, torch.ones(126, 1, device=DEVICE), 1, 128, torch.bfloat16))
    assert torch.equal(widen(matrix).float(), finite.float())
    assert torch.equal(matrix.dense().float(), finite.float())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 18, 130])
def test_products(rows: int, layout: str) -> None:
    """Products of one row, of a few, and of so many that the matrix is widened first. Halves end at a block or not."""
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH).to(DEVICE, torch.bfloat16)
    for outputs in (256, 208):
        weight = scaled(outputs, WIDTH, layout=layout, dtype=torch.bfloat16, device=DEVICE)
        packed, exact = OURS.prepare_linear(as_bytes(weight), None), x.double() @ widened(weight).T
        assert isinstance(packed, ScaledLinear)
        close(OURS.linear(x, packed), exact)
        gate, up = exact.chunk(2, -1)
        close(OURS.linear_silu_mul(x, packed), F.silu(gate) * up)


@pytest.mark.parametrize("inner", [128, 96])
@pytest.mark.parametrize("tokens", [2, 40])
def test_experts(tokens: int, inner: int) -> None:
    torch.manual_seed(tokens)
    matrices = [
        scaled(3, *sizes, layout="block", dtype=torch.bfloat16, device=DEVICE)
        for sizes in ((2 * inner, WIDTH), (WIDTH, inner))
    ]
    x, scores = torch.randn(tokens, WIDTH).to(DEVICE, torch.bfloat16), torch.randn(tokens, 3).to(DEVICE)
    weights, ids = TORCH.route(scores, RouteRule(top_k=1, num_shared=1, shared="gated"))
    packed = OURS.prepare_experts(*map(as_bytes, matrices))
    assert isinstance(packed, ScaledExperts)
    want = TORCH.experts(x.double(), TORCH.prepare_experts(*map(widened, matrices)), weights, ids)
    got = OURS.experts(x, packed, weights, ids)
    if ON_GPU:  # which rounds activations to FP8 too
        assert relative_error(got, want) <= 8e-2
    else:
        close(got, want)
