"""Triton matrix products: against fp64, over tiles, splits of K, gates, and rows that do not see their neighbours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.reference import PackedLinear, linear
from forkpoint.ops.linear.tiles import (
    LARGEST,
    SINGLE_OUTPUTS,
    Tile,
    fastest_gated_tile,
    fastest_tile,
    fixed_gated_tile,
    fixed_splits,
    fixed_tile,
)
from forkpoint.ops.select import torch_table
from tests.ops.triton_cases import DEVICE, ON_GPU, sized, triton_ops

OURS, TORCH = triton_ops(), torch_table()
DTYPES = [torch.float32, torch.bfloat16]
# Of the result's scale. fp32: a chain of K roundings; bf16: up to three, and the interpreter cuts off instead.
TOLERANCE = {torch.float32: 8e-6, torch.bfloat16: 1.2e-2 if ON_GPU else 2.4e-2}
TILES = [
    Tile(16, 32, 64, 4, 3),
    Tile(16, 64, 32, 4, 3, turned=True),
    Tile(16, 64, 32, 4, 2, splits=3, turned=True),
    Tile(32, 16, 64, 4, 2, group=1),
]


def multiply(x: Tensor, packed: PackedLinear, tile: Tile, gated: bool = False) -> Tensor:
    from forkpoint.ops.linear import kernel

    return kernel.multiply(x, packed.weight, packed.bias, tile, gated)


def operands(rows: int, outputs: int, width: int, dtype: torch.dtype, bias: bool) -> tuple[Tensor, PackedLinear]:
    torch.manual_seed(rows + outputs)
    x = torch.randn(rows, 2 * width + 8)[:, 8 : 8 + width]
    weight = torch.randn(outputs, width) * width**-0.5
    parts = x, weight, torch.randn(outputs)
    x, weight, vector = (part.to(DEVICE, dtype) for part in parts)
    wide = torch.zeros(rows, width + 24, dtype=dtype, device=DEVICE)
    wide[:, 8 : 8 + width] = x
    return wide[:, 8 : 8 + width], PackedLinear(weight, vector if bias else None)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "width", "bias"),
    sized(
        [(1, 70, 96, False), (35, 64, 100, True)], [(1, 4096, 4096, False), (300, 1234, 2048, True), (17, 16, 8, False)]
    ),
)
def test_products(rows: int, outputs: int, width: int, bias: bool, dtype: torch.dtype, tile: Tile) -> None:
    x, packed = operands(rows, outputs, width, dtype, bias)
    exact = x.double() @ packed.weight.double().T + (packed.bias.double() if packed.bias is not None else 0.0)
    close(multiply(x, packed, tile), exact, dtype)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner", "width"), sized([(3, 40, 96)], [(1, 12288, 4096), (130, 1000, 520)]))
def test_gated_products(rows: int, inner: int, width: int, dtype: torch.dtype, tile: Tile) -> None:
    x, packed = operands(rows, 2 * inner, width, dtype, False)
    gate, up = (x.double() @ packed.weight.double().T).chunk(2, -1)
    close(multiply(x, packed, tile, gated=True), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "width", "bias"), sized([(37, 100, True), (16, 64, False)], [(4096, 12288, False), (12352, 4096, True)])
)
def test_one_row(outputs: int, width: int, bias: bool, dtype: torch.dtype) -> None:
    x, packed = operands(1, outputs, width, dtype, bias)
    tile = Tile(1, 8, 64, 4, 3)
    exact = x.double() @ packed.weight.double().T + (packed.bias.double() if packed.bias is not None else 0.0)
    close(multiply(x, packed, tile), exact, dtype)
    if not bias:
        gate, up = exact.chunk(2, -1)
        close(multiply(x, packed, tile, gated=True), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("rows", [1, 9, 40, 140])
def test_weights_in_fp32_keep_their_precision(rows: int) -> None:
    x, _ = operands(rows, 40, 160, torch.bfloat16, False)
    weight = torch.randn(40, 160, device=DEVICE)
    exact = x.double() @ weight.double().T
    assert OURS.wide_linear is not None
    close(OURS.wide_linear(x, PackedLinear(weight, None)), exact, torch.float32)
    with pytest.raises(AssertionError):
        close((x @ weight.bfloat16().T).float(), exact, torch.float32)


def test_splits_of_many_rows_come_one_piece_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from forkpoint.ops.linear import kernel

    x, packed = operands(37, 40, 96, torch.float32, True)
    whole = multiply(x, packed, TILES[2])
    monkeypatch.setattr(kernel, "SPLIT_ROWS", 16)
    assert torch.equal(multiply(x, packed, TILES[2]), whole)


@pytest.mark.parametrize(
    ("outputs", "width"), [(64, 2048), (257, 2048), (4096, 4096), (4096, 12288), (12352, 4096), (151936, 64)]
)
def test_choices(outputs: int, width: int) -> None:
    for rows in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 4096):
        fast, fixed = (choose(rows, outputs, width, torch.bfloat16) for choose in (fastest_tile, fixed_tile))
        assert fast is None or rows <= fast.rows or outputs <= SINGLE_OUTPUTS
        parts = fastest_tile(rows, outputs, width, torch.bfloat16, True)
        assert parts == fast or (parts is not None and outputs == 257 and fast is None and parts.splits == 4)
        assert fixed.splits == fixed_splits(width) and fixed.rows > 1 and (rows <= 4 * fixed.rows or rows > LARGEST)
        gated = fastest_gated_tile(rows, outputs, torch.bfloat16)
        fixed_gated = fixed_gated_tile(rows, outputs, width, torch.bfloat16)
        assert gated is None or rows <= gated.rows
        assert (fixed_gated is None) == (rows > LARGEST or fixed_splits(width) > 1)
        assert fixed_gated is None or fixed_gated.rows > 1
    assert fastest_tile(1, outputs, width, torch.float32) is fastest_gated_tile(1, outputs, torch.float32) is None


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_gated_product_has_the_bits_of_its_parts(tile: Tile) -> None:
    x, packed = operands(5, 64, 64, torch.bfloat16, False)
    assert torch.equal(multiply(x, packed, tile, gated=True), OURS.silu_mul(multiply(x, packed, tile)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operators_follow_the_reference(dtype: torch.dtype) -> None:
    x, packed = operands(4, 48, 72, dtype, False)
    exact = linear(x.double(), PackedLinear(packed.weight.double(), None))
    close(OURS.linear(x, packed), exact, dtype)
    gate, up = exact.chunk(2, -1)
    close(OURS.linear_silu_mul(x, packed), F.silu(gate) * up, dtype)
    close(TORCH.linear_silu_mul(x, packed), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_see_their_neighbours(dtype: torch.dtype) -> None:
    from forkpoint.ops.linear.device_linear import DeviceLinear

    x, packed = operands(70, 40, 130, dtype, True)
    fixed = DeviceLinear(True, OURS.silu_mul)
    whole, gated = fixed.linear(x, packed), fixed.linear_silu_mul(x, packed._replace(bias=None))
    for rows in (33, 1):
        order = torch.randperm(70)[:rows].to(DEVICE)
        assert torch.equal(fixed.linear(x[order], packed), whole[order])
        assert torch.equal(fixed.linear_silu_mul(x[order], packed._replace(bias=None)), gated[order])
