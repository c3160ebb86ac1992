"""The Triton convolution against torch: outputs to rounding, windows bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forkpoint.ops.parameters import ConvTaps
from forkpoint.ops.select import torch_table
from tests.ops.recurrence_cases import padded_pool, rows, segments
from tests.ops.triton_cases import DEVICE, behind, copy_pool, on_device, padded, sized, triton_ops

OURS, TORCH = triton_ops(), torch_table()
DTYPES = [torch.float32, torch.bfloat16]
LENS = [1, 2, 3, 65]
EXPORTS: list[list[tuple[int, int]]] = [[], [(2, 13)], [(2, -1), (3, 14)], [(64, 15), (65, 12)]]


def inputs(num_tokens: int, dim: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, weight, bias, pool)."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 2 * dim).to(DEVICE, dtype)[:, :dim]
    weight, bias = torch.randn(dim, width).to(DEVICE, dtype), torch.randn(dim).to(DEVICE, dtype)
    return x, weight, bias, padded_pool(16, (width - 1, dim), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_of_weights_leaves_the_bits_alone(dtype: torch.dtype) -> None:
    x, weight, bias, cpu_pool = inputs(70, 40, 4, dtype)
    pool = copy_pool(cpu_pool)
    by_tap = weight.t().contiguous().t()
    index, decodes = on_device(segments([70], [0], [1])), on_device(rows([0, -1], [1, -1]))
    for got, want in (
        (OURS.conv_prefill(x, ConvTaps(w, bias, True), pool, index) for w in (by_tap, weight)),
        (OURS.conv_update(x[:2], ConvTaps(w, bias, True), pool, decodes) for w in (by_tap, weight)),
    ):
        assert torch.equal(got, want)


def check(got: Tensor, want: Tensor) -> None:
    tolerance = {"atol": 4e-2, "rtol": 1e-2} if got.dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "width", "silu"), sized([(20, 4, True), (33, 2, False), (20, 10, True), (8, 18, False)], [(8192, 4, True)])
)
def test_segments(dim: int, width: int, silu: bool, dtype: torch.dtype) -> None:
    x, weight, bias, pool = inputs(sum(LENS), dim, width, dtype)
    ours, want = copy_pool(pool), copy_pool(pool)
    # In place, from nothing, into nothing, from one slot to another.
    index = on_device(segments(LENS, [0, -1, 3, 4], [0, 2, -1, 5], EXPORTS))
    with_bias = None if silu else bias
    check(
        OURS.conv_prefill(x, ConvTaps(weight, with_bias, silu), ours, index),
        TORCH.conv_prefill(x, ConvTaps(weight, with_bias, silu), want, index),
    )
    assert torch.equal(ours, want)
    ours, want = copy_pool(pool), copy_pool(pool)
    assert torch.equal(OURS.window_prefill(x, ours, index), TORCH.window_prefill(x, want, index))
    assert torch.equal(ours, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "width"), sized([(20, 4), (300, 3), (8, 2), (20, 10)], [(8192, 4)]))
def test_update(dim: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias, pool = inputs(4, dim, width, dtype)
    ours, want = copy_pool(pool), copy_pool(pool)
    index = on_device(rows([0, -1, 3, 4], [0, 2, -1, 5]))
    check(
        OURS.conv_update(x, ConvTaps(weight, bias, True), ours, index),
        TORCH.conv_update(x, ConvTaps(weight, bias, True), want, index),
    )
    assert torch.equal(ours, want)
    ours, want = copy_pool(pool), copy_pool(pool)
    assert torch.equal(OURS.window_update(x, ours, index), TORCH.window_update(x, want, index))
    assert torch.equal(ours, want)


def test_short_and_long_prefills_give_the_same_bits() -> None:
    """Their programs take different numbers of tokens."""
    x, weight, _, pool = inputs(600, 40, 4, torch.bfloat16)
    pool = copy_pool(pool)
    whole = OURS.conv_prefill(x, ConvTaps(weight, None, True), pool, on_device(segments([600], [0], [1])))
    part = OURS.conv_prefill(x[:130], ConvTaps(weight, None, True), pool, on_device(segments([130], [0], [2])))
    assert torch.equal(part, whole[:130])


def test_padding_is_harmless() -> None:
    x, weight, _, pool = inputs(sum(LENS), 20, 4, torch.float32)
    ours, want = copy_pool(pool), copy_pool(pool)
    index = on_device(segments(LENS, [0, -1, 3, 4], [0, 2, -1, 5], EXPORTS))
    expected = OURS.conv_prefill(x, ConvTaps(weight, None, True), want, index)
    got = OURS.conv_prefill(behind(x, 130), ConvTaps(weight, None, True), ours, padded(index))
    assert torch.equal(got[: sum(LENS)], expected) and torch.equal(ours, want)
    expected = OURS.conv_update(x[:2], ConvTaps(weight, None, True), want, on_device(rows([0, 3], [0, 6])))
    got = OURS.conv_update(
        behind(x[:2], 2), ConvTaps(weight, None, True), ours, on_device(rows([0, 3, -1, -1], [0, 6, -1, -1]))
    )
    assert torch.equal(got[:2], expected) and torch.equal(ours, want)


@pytest.mark.parametrize("length", sized([130], [1, 63, 64, 127, 128, 1000]))
def test_in_place_equals_apart(length: int) -> None:
    x, weight, _, pool = inputs(length, 40, 4, torch.float32)
    pool = copy_pool(pool)
    apart = OURS.conv_prefill(x, ConvTaps(weight, None, True), pool, on_device(segments([length], [0], [1])))
    same = OURS.conv_prefill(x, ConvTaps(weight, None, True), pool, on_device(segments([length], [0], [0])))
    assert torch.equal(apart, same) and torch.equal(pool[0], pool[1])
