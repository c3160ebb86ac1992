"""Triton products with weights in FP8: against the widened weights, over layouts of scales, and rows on their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.activation import kernel as activation
from forkpoint.ops.linear import fp8_kernel
from forkpoint.ops.linear.device_linear import DeviceLinear
from forkpoint.ops.linear.fp8_kernel import narrow
from forkpoint.ops.linear.scaled import ScaledExperts, ScaledLinear, ScaledMatrix
from forkpoint.ops.linear.tiles import FEW_SCALED, LARGEST, Tile, fixed_scaled_tile, scaled_tile
from forkpoint.ops.linear.widen_kernel import widen
from forkpoint.ops.moe.device_experts import DeviceExperts
from forkpoint.ops.moe.kernel import grouped_experts, paired_experts
from forkpoint.ops.norm import kernel as norm
from forkpoint.ops.parameters import RouteRule
from forkpoint.ops.select import torch_table
from forkpoint.platforms.platform import DeviceTraits
from tests.ops.fp8_cases import LAYOUTS, widened
from tests.ops.fp8_cases import scaled as made
from tests.ops.triton_cases import DEVICE, gpu_only, relative_error, sized, triton_ops

OURS, TORCH = triton_ops(), torch_table()
DTYPES = [torch.float32, torch.bfloat16]
# As in test_triton_linear.
TOLERANCE = {torch.float32: 8e-6, torch.bfloat16: 2.4e-2}
TILES = [
    Tile(16, 32, 64, 4, 3),
    Tile(16, 64, 128, 4, 3, turned=True),
    Tile(16, 64, 128, 4, 2, splits=2, turned=True),
    Tile(32, 64, 128, 4, 3, turned=True, narrows=True),
    Tile(32, 128, 128, 4, 2, splits=2, narrows=True),
]


def scaled(*shape: int, layout: str, dtype: torch.dtype) -> ScaledMatrix:
    return made(*shape, layout=layout, dtype=dtype, device=DEVICE)


def routing(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    scores = torch.randn(tokens, experts).to(DEVICE)
    return TORCH.route(scores, RouteRule(top_k=top_k, num_shared=1, shared="gated"))


def close(got: Tensor, want: Tensor, dtype: torch.dtype, narrows: bool = False) -> None:
    """Hopper's matrix units sum products of FP8 (`narrows`) in fewer bits than those of fp32."""
    bound = max(TOLERANCE[dtype], 1e-3 if narrows and DEVICE.type == "cuda" else 0.0)
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want).abs().max() <= bound * want.abs().max()


def rounded(x: Tensor) -> Tensor:
    """Round x as `narrow` does."""
    codes, scales = narrow(x, 128)
    return (codes.double() * scales.repeat_interleave(128, 1)[:, : x.shape[1]])[: len(x)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner", "width"), sized([(18, 70, 296)], [(130, 1000, 520)]))
def test_products(rows: int, inner: int, width: int, dtype: torch.dtype, layout: str, tile: Tile) -> None:
    from forkpoint.ops.linear.kernel import multiply

    torch.manual_seed(rows)
    x, bias = torch.randn(rows, width).to(DEVICE, dtype), torch.randn(2 * inner).to(DEVICE, dtype)
    weight = scaled(2 * inner, width, layout=layout, dtype=dtype)
    exact = (rounded(x) if tile.narrows else x.double()) @ widened(weight).T
    close(multiply(x, weight, bias, tile), exact + bias.double(), dtype, tile.narrows)
    gate, up = exact.chunk(2, -1)
    close(multiply(x, weight, None, tile, gated=True), F.silu(gate) * up, dtype, tile.narrows)


@pytest.mark.parametrize("layout", ["block", "channel"])
@pytest.mark.parametrize("gated", [False, True])
def test_one_row(gated: bool, layout: str) -> None:
    from forkpoint.ops.linear.kernel import multiply

    torch.manual_seed(0)
    x, bias = torch.randn(1, 296).to(DEVICE, torch.bfloat16), torch.randn(256).to(DEVICE, torch.bfloat16)
    weight = scaled(256, 296, layout=layout, dtype=torch.bfloat16)
    exact = x.double() @ widened(weight).T
    gate, up = exact.chunk(2, -1)
    want = F.silu(gate) * up if gated else exact + bias.double()
    close(multiply(x, weight, None if gated else bias, Tile(1, 64, 128, 1, 6), gated), want, torch.bfloat16)


@gpu_only
@pytest.mark.parametrize("layout", ["block", "channel"])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 33, 100, 150])
@pytest.mark.parametrize(("outputs", "width"), [(4096, 4096), (12288, 4096), (272, 12288)])
def test_products_of_full_size(outputs: int, width: int, rows: int, layout: str) -> None:
    """With many rows x is in FP8 too: 3 fraction bits, errors of a step's 32nd, which add up as a random walk."""
    torch.manual_seed(0)
    x, bias = torch.randn(rows, width).to(DEVICE, torch.bfloat16), torch.randn(outputs).to(DEVICE, torch.bfloat16)
    weight = scaled(outputs, width, layout=layout, dtype=torch.bfloat16)
    exact = x.double() @ widened(weight).T + bias.double()
    got = OURS.linear(x, OURS.prepare_linear(weight, bias))
    error = 5e-3 if rows <= FEW_SCALED else 4e-2
    assert got.shape == exact.shape and relative_error(got, exact) <= error
    gate, up = (exact - bias.double()).chunk(2, -1)
    got = OURS.linear_silu_mul(x, OURS.prepare_linear(weight, None))
    assert relative_error(got, F.silu(gate) * up) <= 2 * error


@pytest.mark.parametrize("columns", [128, 300])
def test_narrowing(columns: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(19, 384 if columns == 128 else 300).to(DEVICE, torch.bfloat16)
    x[3] = 0
    codes, scales = narrow(x, columns)
    assert codes.shape[0] == 64 and scales.stride(0) == 1
    wide = codes.float() * scales.repeat_interleave(columns, 1)
    assert not wide[19:].any() and not wide[3].any()
    blocks = x.float().unflatten(1, (-1, columns)).abs().amax(-1).repeat_interleave(columns, 1)
    assert ((wide[:19] - x.float()).abs() <= blocks / 27.9).all()  # half of the steps of 32 at 448


def test_what_one_row_does_without_the_matrix_units() -> None:
    whole, cut = (scaled(2 * inner, 256, layout="block", dtype=torch.bfloat16) for inner in (128, 192))
    assert whole.by_one_row(gated=True) and cut.by_one_row(gated=False) and not cut.by_one_row(gated=True)
    assert not whole.by_row().by_one_row(gated=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "width"), sized([(200, 300)], [(12288, 4096)]))
def test_widening(rows: int, width: int, layout: str) -> None:
    matrix = scaled(rows, width, layout=layout, dtype=torch.float32)
    assert torch.equal(widen(matrix), matrix.dense())


def test_every_code_is_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[codes.float().isfinite()].repeat(64)[: 126 * 128].view(126, 128).to(DEVICE)
    matrix = ScaledMatrix(finite, torch.ones(126, 1, device=DEVICE), 1, 128, torch.bfloat16)
    assert torch.equal(widen(matrix).float(), finite.float())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 5, LARGEST + 2])
def test_the_operators_take_fp8(rows: int, layout: str) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 136).to(DEVICE, torch.bfloat16)
    weight = scaled(128, 136, layout=layout, dtype=torch.bfloat16)
    packed, exact = OURS.prepare_linear(weight, None), x.double() @ widened(weight).T
    assert isinstance(packed, ScaledLinear)
    close(OURS.linear(x, packed), exact, torch.bfloat16)
    gate, up = exact.chunk(2, -1)
    close(OURS.linear_silu_mul(x, packed), F.silu(gate) * up, torch.bfloat16)


def test_choices() -> None:
    for rows in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 4096):
        for gated in (False, True):
            tile = fixed_scaled_tile(rows, 4096, gated, torch.bfloat16)
            assert tile.width == 128 and tile.splits == 1 and (rows <= tile.rows or rows > LARGEST)
            widened = scaled_tile(rows, 4096, 4096, gated, torch.bfloat16, alone=False, narrows=False)
            assert (widened is None) == (rows > LARGEST) and (widened is None or replace(widened, splits=1) == tile)
            narrows = scaled_tile(rows, 4096, 4096, gated, torch.bfloat16, alone=True, narrows=True)
            assert narrows is None or narrows.narrows == (rows > FEW_SCALED)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_do_not_see_their_neighbours(layout: str) -> None:
    fixed, x = DeviceLinear(True, OURS.silu_mul), torch.randn(70, 264).to(DEVICE, torch.bfloat16)
    packed = fixed.prepare_linear(scaled(64, 264, layout=layout, dtype=torch.bfloat16), None)
    whole, gated = fixed.linear(x, packed), fixed.linear_silu_mul(x, packed)
    for rows in (33, 1):
        order = torch.randperm(70)[:rows].to(DEVICE)
        assert torch.equal(fixed.linear(x[order], packed), whole[order])
        assert torch.equal(fixed.linear_silu_mul(x[order], packed), gated[order])


@pytest.mark.parametrize(
    ("layout", "inner", "gated", "dtype"),
    [
        ("block", 128, True, torch.bfloat16),
        ("row", 72, True, torch.float32),
        ("channel", 72, True, torch.float32),
        ("channel", 72, False, torch.bfloat16),
    ],
)
def test_experts(layout: str, inner: int, gated: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(inner)
    num_experts, hidden, tokens = 4, 136, 5
    packed = ScaledExperts(
        scaled(num_experts, (1 + gated) * inner, hidden, layout=layout, dtype=dtype),
        scaled(num_experts, hidden, inner, layout=layout, dtype=dtype),
    )
    x = torch.randn(tokens, hidden).to(DEVICE, dtype)
    weights, ids = routing(tokens, num_experts, 2)
    plain = TORCH.prepare_experts(widened(packed.gate_up), widened(packed.down))
    want = TORCH.experts(x.double(), plain, weights, ids)
    tile = Tile(16, 32, 32, 4, 2) if dtype == torch.float32 else Tile(16, 64, 128, 4, 3, turned=True)
    close(grouped_experts(x, packed, weights, ids, tile, tile), want, dtype)
    if layout != "row":
        close(paired_experts(x[:1], packed, weights[:1], ids[:1]), want[:1], dtype)
    # The answers of the first product are rounded by a launch, or by its programs.
    for outputs in (64, 128) if layout == "block" else (128,):
        narrow_tile = Tile(16, outputs, 128, 4, 3, turned=True, narrows=True)
        got = grouped_experts(x, packed, weights, ids, narrow_tile, narrow_tile)
        assert relative_error(got, want) <= 8e-2


@gpu_only
@pytest.mark.parametrize("tokens", [1, 8, 33, 100, 200, 700, 6000])
def test_experts_of_full_size(tokens: int) -> None:
    """Whatever number of tokens, against activations that stay in bfloat16."""
    torch.manual_seed(tokens)
    matrices = [scaled(65, *shape, layout="block", dtype=torch.bfloat16) for shape in ((1024, 2048), (2048, 512))]
    packed, x = OURS.prepare_experts(*matrices), torch.randn(tokens, 2048).to(DEVICE, torch.bfloat16)
    weights, ids = routing(tokens, 65, 8)
    want = DeviceExperts(True)(x, packed, weights, ids)
    assert relative_error(DeviceExperts(False)(x, packed, weights, ids), want) <= 8e-2


def test_the_experts_operator_takes_fp8() -> None:
    matrices = [scaled(3, *shape, layout="block", dtype=torch.bfloat16) for shape in ((256, 136), (136, 128))]
    packed = OURS.prepare_experts(*matrices)
    assert isinstance(packed, ScaledExperts)
    x = torch.randn(2, 136).to(DEVICE, torch.bfloat16)
    weights, ids = routing(2, 3, 1)
    want = TORCH.experts(x.double(), TORCH.prepare_experts(*map(widened, matrices)), weights, ids)
    fixed = DeviceExperts(True)
    whole = fixed(x, packed, weights, ids)
    close(whole, want, torch.bfloat16)
    assert torch.equal(fixed(x[1:], packed, weights[1:], ids[1:]), whole[1:])


def test_what_products_read_is_rounded_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits as by a launch of its own, which a plain copy of it goes through."""
    monkeypatch.setattr(fp8_kernel, "traits_of", lambda device: DeviceTraits(multiplies_fp8=True))
    torch.manual_seed(0)
    rows, heads, size = 18, 3, 128
    x, other = (torch.randn(rows, heads * size).to(DEVICE, torch.bfloat16) for _ in range(2))
    weight, parts = torch.rand(heads * size).to(DEVICE), (rows, heads, size)
    gated = norm.gated_rmsnorm(x.view(parts), other.view(parts), weight[:size], 1e-6, rounded=True)
    assert gated.shape == parts
    made = {
        "norm": norm.rmsnorm(x, weight, 1e-6, rounded=True),
        "norm of a sum": norm.add_rmsnorm(x, other.clone(), weight, 1e-6, rounded=True)[0],
        "norm of heads": gated.flatten(1),
        "gate": activation.silu_mul(torch.cat((x, other), 1), rounded=True),
    }
    for name, found in made.items():
        assert isinstance(found, fp8_kernel.Rounded), name
        plain = found.clone()
        assert not isinstance(plain, fp8_kernel.Rounded), name
        for given, want in zip(narrow(found, 128), narrow(plain, 128), strict=True):
            assert given.stride() == want.stride() and torch.equal(given[:rows].float(), want[:rows].float()), name
    assert torch.equal(made["norm"], norm.rmsnorm(x, weight, 1e-6))
    assert not isinstance(norm.rmsnorm(x[:FEW_SCALED], weight, 1e-6, rounded=True), fp8_kernel.Rounded)


@pytest.mark.parametrize("layout", ["block", "channel"])
def test_two_matrices_in_one_launch(layout: str) -> None:
    """With one row, the bits of the first product are those of its own launch."""
    torch.manual_seed(0)
    x, first = torch.randn(1, 256).to(DEVICE, torch.bfloat16), scaled(136, 256, layout=layout, dtype=torch.bfloat16)
    packed, beside = OURS.prepare_linear(first, None), OURS.prepare_linear(torch.randn(7, 256).to(x), None)
    assert OURS.linear_both is not None
    both = OURS.linear_both(x, packed, beside)
    assert both is not None and torch.equal(both[0], OURS.linear(x, packed))
    close(both[1], x.double() @ beside.weight.double().T, torch.bfloat16)
    assert OURS.linear_both(x.repeat(2, 1), packed, beside) is None
