"""Sums that products and experts leave to the operator behind them: those of sums that are made, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forkpoint.ops.linear.kernel import multiply
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.moe.kernel import grouped_experts
from forkpoint.ops.moe.reference import PackedExperts
from forkpoint.ops.parameters import RouteRule
from forkpoint.ops.unmade import Parts
from tests.ops.triton_cases import DEVICE, sized, triton_ops

OURS = triton_ops()
SPLIT = Tile(16, 32, 32, 4, 2, splits=4)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE, torch.bfloat16)


def check_norm(parts: Tensor, made: Tensor, residual: Tensor, factor: Tensor) -> None:
    want, total = OURS.add_rmsnorm(made, residual.clone(), factor, 1e-6)
    got, ours = OURS.add_rmsnorm(parts, residual.clone(), factor, 1e-6)
    assert torch.equal(ours, total)
    if total.shape[1] > 1024:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want)  # short rows are reduced in other lanes


@pytest.mark.parametrize(("rows", "size"), sized([(3, 40)], [(32, 4096), (128, 2048)]))
def test_of_splits_by_a_norm(rows: int, size: int) -> None:
    x, weight, residual, factor = randn(rows, 128), randn(size, 128), randn(rows, size), randn(size).float()
    made, parts = multiply(x, weight, None, SPLIT), multiply(x, weight, None, SPLIT, parts=True)
    assert isinstance(parts, Parts) and parts.own.shape == (rows, 4, size)
    check_norm(parts, made, residual, factor)
    with pytest.raises(AssertionError, match="left to a norm"):
        parts + 1
    assert not isinstance(multiply(x, weight, factor.bfloat16(), SPLIT, parts=True), Parts)


def test_of_experts_by_a_norm() -> None:
    x, packed, tile = randn(9, 40), PackedExperts(randn(4, 48, 40), randn(4, 40, 24)), Tile(16, 16, 32, 4, 2)
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(9)]).int().to(DEVICE)
    weights, residual, factor = torch.rand(9, 3).to(DEVICE), randn(9, 40), torch.rand(40).to(DEVICE)
    made, parts = (grouped_experts(x, packed, weights, ids, tile, tile, flag) for flag in (False, True))
    assert isinstance(parts, Parts)
    check_norm(parts, made, residual, factor)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_of_scores_by_their_choice(score: str) -> None:
    """Whose last columns are for a kernel's sake."""
    rule = RouteRule(top_k=3, num_shared=1, shared="gated", score=score)  # type: ignore[arg-type]
    x, weight = randn(5, 128), randn(16, 128)
    made, parts = multiply(x, weight, None, SPLIT), multiply(x, weight, None, SPLIT, parts=True)
    for got, want in zip(OURS.route(parts[:, :11], rule), OURS.route(made[:, :11], rule), strict=True):
        assert torch.equal(got, want)
