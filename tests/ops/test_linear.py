"""Linear layers and routed experts, and that the fixed-row kind does not see its neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter

from forkpoint.ops.linear.fixed_rows import FixedRowsLinear
from forkpoint.ops.linear.reference import linear, prepare_linear
from forkpoint.ops.moe.reference import experts_by, prepare_experts, route
from forkpoint.ops.parameters import GateLimits, RouteRule

SHAPES = [(96, 64), (9, 130), (1001, 40)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    packed = prepare_linear(torch.randn(shape), torch.randn(shape[0]) if bias else None)
    x = torch.randn(77, 2 * shape[1])[:, : shape[1]]
    want = F.linear(x, packed.weight, packed.bias)
    assert torch.equal(linear(x, packed), want)
    torch.testing.assert_close(FixedRowsLinear()(x, packed), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_see_their_neighbours(num_threads: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    fixed = FixedRowsLinear()
    packed = prepare_linear(torch.randn(shape).to(dtype), None)
    x = torch.randn(130, shape[1]).to(dtype)
    alone = torch.cat([fixed(row.unsqueeze(0), packed) for row in x])
    for count in (*range(1, 35), 47, 63, 64, 65, 100, 127, 128, 129, 130):
        order = torch.randperm(130)[:count]
        assert torch.equal(fixed(x[order], packed), alone[order]), count


def test_sizes_grow_beyond_one() -> None:
    packed = prepare_linear(torch.randn(96, 64), None)
    assert FixedRowsLinear().sizes(packed)[0] >= 64


def _moe_case(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    x, gate_up, down = torch.randn(50, 32), torch.randn(6, 48, 32) * 0.2, torch.randn(6, 32, 24) * 0.2
    weights, ids = torch.rand(50, 6).topk(3)
    return x.to(dtype), gate_up.to(dtype), down.to(dtype), weights.to(dtype), ids


def test_experts() -> None:
    x, gate_up, down, weights, ids = _moe_case(torch.float32)
    for limits in (None, GateLimits(0.5, 0.3)):
        want = torch.zeros_like(x)
        for t in range(50):
            for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                if limits is not None:
                    gate, up = gate.clamp(max=0.5), up.clamp(-0.3, 0.3)
                want[t] += weight * (down[e] @ (F.silu(gate) * up))
        found = experts_by(linear, x, prepare_experts(gate_up, down), weights, ids, limits)
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def test_experts_without_a_gate() -> None:
    x, up, down, weights, ids = _moe_case(torch.float32)
    want = torch.zeros_like(x)
    for t in range(50):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            want[t] += weight * (down[e] @ F.relu(up[e, :24] @ x[t]).square())
    packed = prepare_experts(up[:, :24], down)
    torch.testing.assert_close(experts_by(linear, x, packed, weights, ids), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_routes_are_those_of_transformers(groups: int, top_groups: int, normalise: bool) -> None:
    torch.manual_seed(3)
    config = transformers.KimiLinearConfig(
        hidden_size=16,
        num_experts=12,
        num_experts_per_tok=4,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalise,
        routed_scaling_factor=2.5,
    )
    theirs = KimiLinearTopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.normal_()
    x = torch.randn(40, 16)
    with torch.no_grad():
        _, want_weights, want_ids = theirs(x)
        scores = x @ theirs.weight.T
    rule = RouteRule(
        top_k=4, score="sigmoid", groups=groups, top_groups=top_groups, normalise=normalise, eps=1e-20, scale=2.5
    )
    weights, ids = route(scores, rule, theirs.e_score_correction_bias)
    places = want_ids.argsort(-1), ids.argsort(-1)  # theirs are in no order
    assert torch.equal(want_ids.gather(-1, places[0]).int(), ids.gather(-1, places[1]))
    torch.testing.assert_close(weights.gather(-1, places[1]), want_weights.gather(-1, places[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_do_not_see_neighbours(dtype: torch.dtype) -> None:
    x, gate_up, down, weights, ids = _moe_case(dtype)
    fixed, packed = FixedRowsLinear(), prepare_experts(gate_up, down)
    alone = torch.cat([experts_by(fixed, x[t : t + 1], packed, weights[t : t + 1], ids[t : t + 1]) for t in range(50)])
    for count in (1, 2, 17, 50):
        order = torch.randperm(50)[:count]
        assert torch.equal(experts_by(fixed, x[order], packed, weights[order], ids[order]), alone[order])
