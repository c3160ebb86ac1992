"""Quantising to 4 bits, and joining matrices in 4 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forkpoint.ops.linear.packed import FLOAT_GROUP, LEVELS, pack, quantise_floats, quantise_packed, unpack
from tests.ops.float_scales import every_scale, exact


@pytest.mark.parametrize("shape", [(40, 64), (3, 24, 72)])
def test_floats(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    made = quantise_floats(matrix)
    assert made.shape == matrix.shape and made.zeros is None and made.group == FLOAT_GROUP
    scales = made.scales.view(torch.float8_e4m3fn).float()
    # The two largest levels are a third of the largest apart. A scale in e4m3 is up to a sixteenth off.
    largest = scales.repeat_interleave(FLOAT_GROUP, -1)[..., : shape[-1]] * made.factors * LEVELS[-1]
    assert ((made.dense() - matrix).abs() <= largest * (1 / 6 + 1 / 15)).all()
    assert (made.dense() - matrix).norm() < 0.11 * matrix.norm()
    assert not quantise_floats(torch.zeros(2, 32)).dense().any()


def test_every_scale_of_floats() -> None:
    torch.manual_seed(2)
    weight = every_scale(2, 16, 128, dtype=torch.bfloat16)
    want = exact(weight)
    assert torch.equal(weight.dense().double(), want)
    assert torch.equal(weight[0].joined(weight[1]).dense().double(), torch.cat((want[0], want[1])))
    assert torch.equal(weight[1].take_columns(24, 104).dense().double(), want[1][:, 24:104])


def test_joined() -> None:
    torch.manual_seed(1)
    first, second = quantise_packed(torch.randn(5, 64), 32), quantise_packed(torch.randn(3, 64), 32)
    assert first.joins(second)
    assert torch.equal(first.joined(second).dense(), torch.cat((first.dense(), second.dense())))
    floats = quantise_floats(torch.randn(3, 64)), quantise_floats(torch.randn(2, 64))
    assert torch.equal(floats[0].joined(floats[1]).dense(), torch.cat([each.dense() for each in floats]))
    for other in (
        quantise_packed(torch.randn(3, 64), 16),
        floats[0],
        replace(second, order=torch.arange(64)),
        replace(second, dtype=torch.bfloat16),
    ):
        assert not first.joins(other)


def test_unpacking_of_one_turned_row() -> None:
    """Zero points of a matrix with 8 rows are stored so. torch calls them contiguous, with a last stride of 4."""
    codes = torch.arange(32, dtype=torch.uint8).view(4, 8) % 16
    turned = pack(codes).view(1, 4).transpose(0, 1)
    assert torch.equal(unpack(turned), codes)
