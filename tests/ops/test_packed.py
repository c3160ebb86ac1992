"""Quantising to 4 bits."""

from __future__ import annotations

import pytest
import torch

from forkpoint.ops.linear.packed import FLOAT_GROUP, LEVELS, quantise_floats


@pytest.mark.parametrize("shape", [(40, 64), (3, 24, 72)])
def test_floats(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    made = quantise_floats(matrix)
    assert made.shape == matrix.shape and made.zeros is None and made.group == FLOAT_GROUP
    assert torch.equal(made.scales.to(torch.float8_e4m3fn).half(), made.scales)
    # The two largest levels are a third of the largest apart. A scale in e4m3 is up to a sixteenth off.
    largest = made.scales.float().repeat_interleave(FLOAT_GROUP, -1)[..., : shape[-1]] * made.factors * LEVELS[-1]
    assert ((made.dense() - matrix).abs() <= largest * (1 / 6 + 1 / 15)).all()
    assert (made.dense() - matrix).norm() < 0.11 * matrix.norm()
    assert not quantise_floats(torch.zeros(2, 32)).dense().any()
