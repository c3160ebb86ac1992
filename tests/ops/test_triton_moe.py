"""Triton routing and experts: against torch, against transformers' block, and tokens that do not see each other."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from forkpoint.models.config import Build
from forkpoint.models.moe import MoEConfig
from forkpoint.models.registry import load_config
from forkpoint.models.weights import FileWeights
from forkpoint.ops.launch import AT_ONCE
from forkpoint.ops.linear.scaled import ScaledExperts, ScaledMatrix
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.moe import order_kernel
from forkpoint.ops.moe.reference import PackedExperts
from forkpoint.ops.parameters import GateLimits, RouteRule
from forkpoint.ops.select import torch_table
from forkpoint.platforms.platform import DeviceTraits
from tests.checkpoints import write_checkpoint
from tests.ops.triton_cases import DEVICE, IS_INTERPRETED, sized, triton_ops

OURS, TORCH = triton_ops(), torch_table()
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}  # of the result's scale; bf16: two intermediate roundings
TILES = [(Tile(16, 16, 32, 4, 2), Tile(16, 32, 32, 4, 2)), (Tile(16, 64, 32, 4, 2, turned=True),) * 2]
FEW_ROWS = (Tile(8, 64, 32, 4, 2, turned=True),) * 2  # fewer rows than the tokens of some batches without sorted pairs


def case(tokens: int, experts: int, inner: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, PackedExperts]:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 2 * hidden)[:, :hidden]
    gate_up = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(experts, hidden, inner) * inner**-0.5
    return x.to(DEVICE, dtype), PackedExperts(gate_up.to(DEVICE, dtype), down.to(DEVICE, dtype))


def routing(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    scores = torch.randn(tokens, experts).to(DEVICE)
    return TORCH.route(scores, RouteRule(top_k=top_k, num_shared=1, shared="gated"))


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).abs().max()
    assert error <= TOLERANCE[want.dtype] * want.double().abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "shared"), sized([(3, 7, 3, 2), (2, 16, 1, 1)], [(300, 256, 8, 1), (9, 512, 10, 0)])
)
def test_route(tokens: int, experts: int, top_k: int, shared: int, normalise: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Distinct bfloat16 values from 1.0 on, so that the order of the chosen is one.
    bits = torch.stack([0x3F80 + torch.randperm(experts + 1) for _ in range(tokens)]).to(torch.int16)
    scores = bits.view(torch.bfloat16).to(DEVICE, dtype)
    rule = RouteRule(top_k=top_k, normalise=normalise, num_shared=shared, shared="gated")
    weights, ids = OURS.route(scores, rule)
    want_weights, want_ids = TORCH.route(scores, rule)
    assert ids.dtype == torch.int32 and torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


RULES = [
    RouteRule(top_k=3, score="sigmoid", eps=1e-20, scale=2.5),
    RouteRule(top_k=3, score="sigmoid", groups=3, top_groups=2, eps=1e-6, num_shared=2),
    RouteRule(top_k=2, score="softmax", normalise=False, num_shared=1),
    RouteRule(top_k=4, score="sigmoid", groups=4, top_groups=2, normalise=False, num_shared=1, shared="gated"),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules(rule: RouteRule, biased: bool) -> None:
    torch.manual_seed(1)
    scores = torch.randn(5, 12 + (rule.shared == "gated")).to(DEVICE)
    bias = torch.randn(12).to(DEVICE) if biased else None
    weights, ids = OURS.route(scores, rule, bias)
    want_weights, want_ids = TORCH.route(scores, rule, bias)
    assert ids.dtype == torch.int32 and torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rule", [RouteRule(top_k=3, num_shared=1, shared="gated"), RULES[0]])
def test_scores_that_are_not_numbers_name_experts_that_are_there(rule: RouteRule) -> None:
    _, ids = OURS.route(torch.full((2, 6), float("nan"), device=DEVICE), rule)
    assert bool(((ids >= 0) & (ids <= 5)).all())


@pytest.mark.parametrize(
    ("tokens", "experts", "choices"), sized([(1, 7, 3), (33, 5, 4)], [(129, 257, 9), (5000, 513, 11), (8192, 257, 9)])
)
@pytest.mark.parametrize("most", [order_kernel.FEW_PAIRS, 0])
def test_pairs_are_ordered_by_expert(
    tokens: int, experts: int, choices: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_kernel, "FEW_PAIRS", most)
    torch.manual_seed(1)
    ids = torch.rand(tokens, experts).topk(choices).indices.int().to(DEVICE)
    order = order_kernel.order_by_expert(ids, experts, 16)
    flat = ids.flatten().long()
    assert torch.equal(order.pairs.long(), flat.argsort(stable=True))
    covered, seen = [], []
    for expert, begin, end in order.tiles.T.tolist():
        if begin < end:
            rows = range(begin, min(begin + 16, end))
            assert set(flat[order.pairs[list(rows)].long()].tolist()) == {expert}
            assert end == int((flat <= expert).sum())
            covered += rows
            seen.append((expert, begin))
    assert sorted(covered) == list(range(flat.numel()))
    assert seen == sorted(seen, reverse=True), "the last expert comes first"
    full = (order.tiles[1] < order.tiles[2]).tolist()
    assert full == sorted(full, reverse=True), "empty tiles come last"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [None, *TILES, FEW_ROWS], ids=["paired", "left", "turned", "few"])
@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "inner", "hidden"),
    sized(
        [(1, 4, 3, 24, 40), (9, 4, 3, 24, 40), (21, 4, 3, 24, 40)],
        [(1, 257, 9, 512, 2048), (15, 257, 9, 512, 2048), (40, 257, 9, 512, 2048), (700, 65, 5, 96, 520)],
    ),
)
def test_experts(
    tokens: int,
    experts: int,
    choices: int,
    inner: int,
    hidden: int,
    tiles: tuple[Tile, Tile] | None,
    dtype: torch.dtype,
) -> None:
    from forkpoint.ops.moe.kernel import grouped_experts, paired_experts

    x, packed = case(tokens, experts, inner, hidden, dtype)
    weights, ids = routing(tokens, experts, choices - 1)
    for limits in (None, GateLimits(0.5, 0.3)):
        want = TORCH.experts(x, packed, weights, ids, limits)
        if tiles is None:
            close(paired_experts(x, packed, weights, ids, limits), want)
        else:
            close(grouped_experts(x, packed, weights, ids, *tiles, limits=limits), want)


@pytest.mark.skipif(not IS_INTERPRETED, reason="the interpreter has no order of launches, so that both forms can run")
@pytest.mark.parametrize(("inner", "dtype"), [(24, torch.float32), (520, torch.float32), (1032, torch.bfloat16)])
def test_weights_that_are_loaded_before_the_wait(
    inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forkpoint.ops.moe import kernel

    x, packed = case(2, 4, inner, 40, dtype)
    weights, ids = routing(2, 4, 2)
    want = kernel.paired_experts(x, packed, weights, ids)
    for wait in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(triton.language.extra.cuda, wait, lambda: None)
    monkeypatch.setattr(kernel, "MOST_HELD_BYTES", 2**20)
    asked = list[bool]()

    def overlap(device: torch.device, num_rows: int, at_once: bool) -> dict[str, int]:
        asked.append(at_once)
        return {"OVERLAP": AT_ONCE.value}

    monkeypatch.setattr(kernel, "overlap", overlap)
    assert torch.equal(kernel.paired_experts(x, packed, weights, ids), want) and asked == [True]


@pytest.mark.parametrize("tiles", [None, *TILES], ids=["paired", "left", "turned"])
@pytest.mark.parametrize("inner", [24, 520])
def test_experts_without_a_gate(inner: int, tiles: tuple[Tile, Tile] | None) -> None:
    from forkpoint.ops.moe.kernel import grouped_experts, paired_experts

    x, packed = case(5, 4, inner, 40, torch.bfloat16)
    packed = PackedExperts(packed.gate_up[:, :inner].contiguous(), packed.down)
    weights, ids = routing(5, 4, 2)
    want = TORCH.experts(x, packed, weights, ids)
    if tiles is None:
        close(paired_experts(x, packed, weights, ids), want)
    else:
        close(grouped_experts(x, packed, weights, ids, *tiles), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_do_not_see_each_other(dtype: torch.dtype) -> None:
    from forkpoint.ops.moe.device_experts import DeviceExperts

    if DEVICE.type == "cuda":  # from few rows of an expert to many
        tokens, few, (experts, choices, inner, hidden) = 3000, (1, 2, 8, 65, 256, 1000), (33, 5, 96, 520)
    else:
        tokens, few, (experts, choices, inner, hidden) = 20, (1, 7), (5, 3, 24, 40)
    x, packed = case(tokens, experts, inner, hidden, dtype)
    weights, ids = routing(tokens, experts, choices - 1)
    fixed = DeviceExperts(deterministic=True)
    whole = fixed(x, packed, weights, ids)
    for count in few:
        some = torch.randperm(tokens)[:count].to(DEVICE)
        assert torch.equal(fixed(x[some], packed, weights[some], ids[some]), whole[some])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tiles", [*TILES, FEW_ROWS], ids=["left", "turned", "few"])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17])
def test_a_token_without_numbers_spoils_no_other(tokens: int, tiles: tuple[Tile, Tile]) -> None:
    from forkpoint.ops.moe.kernel import grouped_experts

    x, packed = case(tokens, 5, 24, 40, torch.bfloat16)
    weights, ids = routing(tokens, 5, 2)
    want = grouped_experts(x, packed, weights, ids, *tiles)
    spoilt = x.clone()
    spoilt[tokens // 2] = torch.nan
    ids[tokens // 2] = ids[tokens // 2, 0]  # scores that are not numbers may choose an expert several times
    found = grouped_experts(spoilt, packed, weights, ids, *tiles)
    others = torch.arange(tokens) != tokens // 2
    assert torch.equal(found[others], want[others]) and bool(found[~others].isnan().all())


@pytest.mark.parametrize("is_scaled", [False, True])
def test_bits_of_deterministic_experts_come_from_equal_tiles(is_scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes the same bits with any tile, and a GPU does not."""
    from forkpoint.ops.moe import device_experts

    gate_up, down = torch.zeros(16, 256, 128), torch.zeros(16, 128, 128)
    packed: Any = PackedExperts(gate_up, down)
    if is_scaled:
        kind = (128, 128, torch.bfloat16)
        gates = ScaledMatrix(gate_up.to(torch.float8_e4m3fn), torch.ones(16, 2, 1), *kind)
        packed = ScaledExperts(gates, ScaledMatrix(down.to(torch.float8_e4m3fn), torch.ones(16, 1, 1), *kind))
    found = list[tuple[Tile, Tile]]()

    def grouped(x: Tensor, packed: Any, weights: Tensor, ids: Tensor, into: Tile, out_of: Tile, *_: Any) -> Tensor:
        found.append((into, out_of))
        return x

    monkeypatch.setattr(device_experts, "grouped_experts", grouped)
    monkeypatch.setattr(device_experts, "MAX_PAIRED", 0)
    monkeypatch.setattr(device_experts, "traits_of", lambda device: DeviceTraits(multiplies_fp8=True))
    for deterministic in (True, False):
        for tokens in (1, 6, 12, 40):
            x, ids = torch.zeros(tokens, 128, dtype=torch.bfloat16), torch.zeros(tokens, 4)
            device_experts.DeviceExperts(deterministic)(x, packed, ids, ids)
    fixed, free = found[:4], found[4:]
    assert all(tile.rows >= 16 and not tile.narrows for pair in fixed for tile in pair)
    assert free[0][0].rows == 8 and all(tile.narrows is is_scaled for pair in free for tile in pair)


@pytest.mark.parametrize("tokens", sized([2, 7], [64, 700]))
def test_the_block_of_transformers(tokens: int, tmp_path: Path) -> None:
    """Whose shared expert is of two parts, the second one not full."""
    theirs = write_checkpoint(tmp_path, "qwen3_next_moe", num_hidden_layers=1).model.layers[0].mlp.to(DEVICE)
    config = load_config(tmp_path)
    with closing(FileWeights(folder=tmp_path, dtype=torch.float32, device=DEVICE)) as weights:
        part = config.layers[0][1]
        assert isinstance(part, MoEConfig)
        ours = part.build(Build(config, weights, OURS), "model.layers.0.mlp", 0)
    x = torch.randn(tokens, config.hidden_size, device=DEVICE)
    with torch.no_grad():
        close(ours(x), theirs(x.unsqueeze(0)).squeeze(0))
