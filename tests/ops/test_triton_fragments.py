"""Triton products with weights in 4 bits in fragments, against the widened weights in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forkpoint.ops.linear.device_linear import DeviceLinear
from forkpoint.ops.linear.fragments import FragmentExperts, FragmentLinear, fits_fragments, in_fragments
from forkpoint.ops.linear.fragments_kernel import FragmentTile, launch_fragments, multiply_fragments
from forkpoint.ops.linear.packed import FourBitExperts, FourBitLinear, PackedMatrix
from forkpoint.ops.linear.unpack_kernel import widen_fragments
from forkpoint.ops.moe import device_experts, fragment_experts
from forkpoint.ops.moe.device_experts import DeviceExperts
from forkpoint.ops.moe.fragment_experts import PROMPT
from forkpoint.ops.moe.fragment_prompt_kernel import columns_across, launch_prompt
from forkpoint.ops.moe.order_kernel import order_by_expert
from forkpoint.ops.parameters import GateLimits, RouteRule
from forkpoint.ops.select import torch_table
from forkpoint.ops.unmade import Parts
from tests.ops.float_scales import every_scale, exact
from tests.ops.packed_cases import close, packed
from tests.ops.triton_cases import DEVICE, triton_ops

OURS, TORCH, BF16 = triton_ops(), torch_table(), torch.bfloat16
FORMS = [(False, 128), (False, 256), (True, 16)]
TILES = [
    FragmentTile(8, 32, 2, 3),
    FragmentTile(16, 64, 2, 2, splits=2),
    FragmentTile(8, 16, 4, 2, deep=True),
    FragmentTile(8, 32, 2, 2, splits=2, deep=True),
    FragmentTile(16, 32, 8, 2, deep=True),  # more warps than blocks of columns
]


def weight_of(*shape: int, group: int, floats: bool) -> PackedMatrix:
    return packed(*shape, group=group, floats=floats, dtype=BF16, symmetric=True)


@pytest.mark.parametrize(("floats", "group"), FORMS)
def test_products(floats: bool, group: int) -> None:
    torch.manual_seed(group)
    weight, bias = weight_of(72, 512, group=group, floats=floats), torch.randn(72).to(DEVICE, BF16)
    dense, made = replace(weight, dtype=torch.float64).dense(), in_fragments(weight)
    assert made.shape == weight.shape
    close(widen_fragments(made), dense, BF16)
    x = torch.randn(11, 512).to(DEVICE, BF16)
    exact = x.double() @ dense.T
    for tile in TILES:
        close(multiply_fragments(x, made, None, tile), exact, BF16)
        close(multiply_fragments(x[:3], made, bias, tile), exact[:3] + bias, BF16)
    parts = multiply_fragments(x, made, None, TILES[1], parts=True)
    assert isinstance(parts, Parts)
    close(parts.own.sum(1).to(BF16), exact, BF16)
    gate, up = exact.split(36, dim=1)
    for tile in (TILES[0], TILES[2]):
        made_up = multiply_fragments(x, made, None, tile, gated=True)
        close(made_up, torch.nn.functional.silu(gate) * up, BF16)
    assert multiply_fragments(x[:0], made, None, TILES[0]).shape == (0, 72)


@pytest.mark.parametrize(("floats", "group"), FORMS[1:])
def test_linear(floats: bool, group: int) -> None:
    torch.manual_seed(group)
    weight, bias = weight_of(64, 256, group=group, floats=floats), torch.randn(64).to(DEVICE, BF16)
    dense = replace(weight, dtype=torch.float64).dense()
    made = OURS.prepare_linear(weight, bias)
    assert isinstance(made, FragmentLinear)
    assert isinstance(DeviceLinear(True, OURS.silu_mul).prepare_linear(weight, bias), FourBitLinear)
    for num_rows in (1, 9, 40, 130):
        x = torch.randn(num_rows, 256).to(DEVICE, BF16)
        close(OURS.linear(x, made), x.double() @ dense.T + bias, BF16)
        gate, up = (x.double() @ dense.T).split(32, dim=1)
        alone = OURS.prepare_linear(weight, None)
        close(OURS.linear_silu_mul(x, alone), torch.nn.functional.silu(gate) * up, BF16)
    columns = torch.randperm(256).to(DEVICE)
    moved = OURS.prepare_linear(replace(weight, order=columns), bias)
    close(OURS.linear(torch.empty_like(x).index_copy_(1, columns, x), moved), x.double() @ dense.T + bias, BF16)


def test_every_scale_of_floats() -> None:
    torch.manual_seed(2)
    weight = every_scale(2, 128, 128, dtype=BF16, device=DEVICE)
    made, want, x = in_fragments(weight), exact(weight), torch.eye(128).to(DEVICE, BF16)
    assert torch.equal(widen_fragments(made).double(), want)
    for tile in (TILES[0], TILES[2]):
        alone = multiply_fragments(x, in_fragments(weight[1]), None, tile)
        assert torch.equal(alone.double(), want[1].T)
    ids, pairs = torch.arange(2, dtype=torch.int32).repeat_interleave(128).view(-1, 1).to(DEVICE), torch.cat((x, x))
    order = order_by_expert(ids, 2, PROMPT.rows)
    by_few, by_many = pairs.new_empty(256, 128), pairs.new_empty(256, 128)
    count = order.tiles.shape[1]
    launch_fragments(pairs, made, by_few, replace(TILES[1], rows=PROMPT.rows), (count, count, 1, 0), order=order)
    launch_prompt(columns_across(pairs), made, by_many, PROMPT, order, 1, into=False)
    for found in (by_few, by_many):
        assert torch.equal(found.double(), torch.cat((want[0].T, want[1].T)))


def test_matrices_that_do_not_fit() -> None:
    assert fits_fragments(weight_of(8, 128, group=128, floats=False))
    assert not fits_fragments(weight_of(8, 128, group=32, floats=False))
    assert not fits_fragments(weight_of(8, 192, group=64, floats=False))
    assert not fits_fragments(weight_of(9, 128, group=16, floats=True))
    assert not fits_fragments(packed(8, 128, group=16, floats=True, dtype=torch.float16))
    assert not fits_fragments(packed(8, 128, group=128, floats=False, dtype=BF16))


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated: bool, floats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    group = 16 if floats else 128
    into = weight_of(5, 256 if gated else 128, 128, group=group, floats=floats)
    down = weight_of(5, 128, 128, group=group, floats=floats)
    x = torch.randn(2, 128).to(DEVICE, BF16)
    weights, ids = TORCH.route(torch.randn(2, 5).to(DEVICE), RouteRule(top_k=2, num_shared=1, shared="gated"))
    made = DeviceExperts(False).prepare(into, down)
    assert isinstance(made, FragmentExperts) and made.gated == gated
    assert isinstance(DeviceExperts(True).prepare(into, down), FourBitExperts)  # whose bits do not depend on the batch
    dense = TORCH.prepare_experts(*(replace(matrix, dtype=torch.float32) for matrix in (into, down)))
    limits = GateLimits(0.5, 0.3) if gated and floats else None
    want = TORCH.experts(x.float(), dense, weights, ids, limits)

    def check() -> None:
        close(OURS.experts(x, made, weights, ids, limits=limits), want, BF16, products=2)

    check()  # each pair has its own tiles
    left = OURS.experts_parts(x, made, weights, ids) if OURS.experts_parts else None
    assert isinstance(left, Parts) and left.shares is not None
    monkeypatch.setattr(fragment_experts, "MAX_PAIRED", 0)
    check()
    monkeypatch.setattr(fragment_experts, "FEW_ROWS", 0)  # as for many pairs
    check()
    monkeypatch.setattr(device_experts, "PROMPT_ROWS", 0)  # as for a long prompt
    check()
    monkeypatch.setattr(device_experts, "fits_prompts", lambda packed: False)
    check()
