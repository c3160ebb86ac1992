"""Products with FP8 experts by groups of warps, run on the host as on a Hopper GPU, against widened weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.fp8_kernel import Activations
from forkpoint.ops.linear.scaled import ScaledExperts, ScaledMatrix
from forkpoint.ops.moe import device_experts, kernel, warps_kernel
from forkpoint.ops.moe.device_experts import DeviceExperts
from forkpoint.ops.moe.order_kernel import ExpertOrder, order_by_expert
from forkpoint.ops.parameters import GateLimits
from forkpoint.platforms.platform import DeviceTraits
from tests.ops.fp8_cases import scaled, widened
from tests.ops.gluon_host import HostKernel, on_host
from tests.ops.triton_cases import DEVICE, ON_GPU, relative_error, triton_ops

pytestmark = pytest.mark.skipif(ON_GPU, reason="test_triton_fp8.py runs the kernel itself on a Hopper GPU")
OURS, BF16 = triton_ops(), torch.bfloat16
TRAITS = DeviceTraits(num_processors=3, has_warpgroups=True, multiplies_fp8=True)
PLAIN = {"OVERLAP": False}


@pytest.fixture(params=[0, 1])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostKernel]:
    """The kernel on a Hopper GPU, where copies land and partitions take turns in an order drawn from a seed."""
    for module in (warps_kernel, device_experts, kernel):
        monkeypatch.setattr(module, "traits_of", lambda device: TRAITS)
    torch.manual_seed(request.param)
    with on_host(warps_kernel, "expert_warps_kernel", request.param) as kernel_on_host:
        yield kernel_on_host


def matrix(*shape: int) -> ScaledMatrix:
    return scaled(*shape, layout="block", dtype=BF16, device=DEVICE)


def routed(*counts: int, choices: int = 1) -> tuple[Tensor, ExpertOrder]:
    """Return random experts of tokens, `counts` pairs for each expert, and their order in tiles."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids))].view(-1, choices).int().to(DEVICE)
    return ids, order_by_expert(ids, len(counts), warps_kernel.TILE.value)


def numbers(x: Activations, num_rows: int) -> Tensor:
    assert x.scales is not None
    return x.rows[:num_rows].double() * x.scales[:num_rows].double().repeat_interleave(128, 1)


def activations(num_rows: int, width: int) -> Activations:
    return Activations.of(torch.randn(num_rows, width).to(DEVICE, BF16), True)


@pytest.mark.parametrize(("outputs", "width", "many"), [(512, 384, 1), (1024, 512, 32), (1024, 512, 1)])
def test_product_out_of_experts(
    outputs: int, width: int, many: int, launched: HostKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts without pairs, and with a part of a group, a group and a half, and two tiles. If tiles are `many`, rows
    stay for several of them."""
    monkeypatch.setattr(warps_kernel, "MANY_TILES", many)
    (ids, order), weight = routed(0, 1, 70, 64, 200), matrix(5, outputs, width)
    count = len(ids)
    x, out = activations(count, width), Activations(torch.full((count, outputs), torch.nan, dtype=BF16), None)
    warps_kernel.multiply_experts(x, weight, out, order, PLAIN)
    pairs = order.pairs.long()
    want = torch.empty(count, outputs, dtype=torch.float64)
    want[pairs] = torch.einsum("pk,pnk->pn", numbers(x, count), widened(weight).double()[ids.flatten()[pairs].long()])
    assert relative_error(out.rows, want) <= 4e-3 and launched.num_programs == TRAITS.num_processors


def test_rows_far_apart(launched: HostKernel) -> None:
    """Offsets of elements do not fit in 32 bits."""
    (_, order), weight, given = routed(66), matrix(1, 256, 128), activations(66, 128)
    far = torch.empty_strided(given.rows.shape, (1 << 25, 1), dtype=given.rows.dtype).copy_(given.rows)
    near, out = torch.empty(66, 256, dtype=BF16), torch.empty_strided((66, 256), (1 << 25, 1), dtype=BF16)
    warps_kernel.multiply_experts(given, weight, Activations(near, None), order, PLAIN)
    warps_kernel.multiply_experts(Activations(far, given.scales), weight, Activations(out, None), order, PLAIN)
    assert torch.equal(out, near)


@pytest.mark.parametrize(("limits", "width", "many"), [(None, 256, 32), (GateLimits(0.5, 0.7), 512, 1)])
def test_product_into_experts(
    limits: GateLimits | None, width: int, many: int, launched: HostKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without rows that stay for two tiles."""
    monkeypatch.setattr(warps_kernel, "MANY_TILES", many)
    (ids, order), weight = routed(3, 66, 131, choices=2), matrix(3, 512, width)
    x, count = activations(len(ids), width), ids.numel()
    out = Activations.empty(count, 256, torch.empty(0, dtype=BF16), True)
    warps_kernel.multiply_experts(x, weight, out, order, PLAIN, gated=True, choices=2, limits=limits)
    rows = numbers(x, len(ids))[order.pairs.long() // 2]
    halves = torch.einsum("pk,pnk->pn", rows, widened(weight).double()[ids.flatten()[order.pairs.long()].long()])
    gate, up = halves.chunk(2, 1)
    if limits is not None:
        gate, up = gate.clamp(max=limits.gate), up.clamp(-limits.up, limits.up)
    assert relative_error(numbers(out, count), F.silu(gate) * up) <= 4e-2
    largest = out.rows[:count].float().view(count, 2, 128).abs().amax(2)
    assert (largest == 448).all(), "a scale is not that of its largest number"


@pytest.mark.parametrize(
    ("layout", "gate_up", "down", "takes"),
    [
        ("block", (3, 512, 512), (3, 512, 256), True),
        ("block", (3, 256, 512), (3, 512, 256), False),  # without gates
        ("block", (3, 512, 384), (3, 384, 256), False),  # the last two tiles of outputs are half a pair
        ("block", (3, 384, 512), (3, 512, 192), False),  # a rank may have such a share of experts
        ("row", (3, 512, 512), (3, 512, 256), False),
        ("channel", (3, 512, 512), (3, 512, 256), False),
    ],
)
def test_experts_that_fit(
    layout: str, gate_up: tuple[int, ...], down: tuple[int, ...], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "traits_of", lambda device: TRAITS)
    packed = ScaledExperts(*(scaled(*shape, layout=layout, dtype=BF16, device=DEVICE) for shape in (gate_up, down)))
    assert kernel.takes_warps(packed) == takes


def test_the_operator_uses_it_for_many_pairs(launched: HostKernel) -> None:
    packed = OURS.prepare_experts(matrix(3, 512, 512), matrix(3, 512, 256))
    assert isinstance(packed, ScaledExperts)
    x = torch.randn(30, 512).to(DEVICE, BF16)
    ids, weights = torch.stack([torch.randperm(3)[:2] for _ in range(30)]).int(), torch.rand(30, 2)
    got = DeviceExperts(False)(x, packed, weights, ids)
    assert launched.num_programs
    want = kernel.grouped_experts(x, packed, weights, ids, *device_experts._scaled_tiles(BF16, 30, 20.0, True))
    assert relative_error(got, want.double()) <= 3e-2
    before = launched.num_programs
    few = 12 * 3 // 2  # tokens
    DeviceExperts(False)(x[:few], packed, weights[:few], ids[:few])
    assert launched.num_programs == before, "few pairs take other kernels"
