"""Triton's norm, rotation and write of projected heads in one launch, against torch's one by one."""

from __future__ import annotations

import pytest
import torch

from forkpoint.ops.select import torch_table
from tests.ops.input_cases import SHAPES, InputCase, InputShape
from tests.ops.triton_cases import DEVICE, ON_GPU, sized, triton_ops

OURS, TORCH = triton_ops(), torch_table()
# The interpreter cuts bfloat16 off instead of rounding it.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 8e-3 if ON_GPU else 2.4e-2}
FULL = [InputShape(16, 4, 256, 256, 64, True), InputShape(30, 30, 128, 128, 128, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", sized(SHAPES, FULL), ids=str)
def test_inputs_follow_torch(shape: InputShape, dtype: torch.dtype) -> None:
    case = InputCase(shape, dtype, DEVICE)
    for got, want in zip(case.run(OURS), case.run(TORCH), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert bool(((got.double() - want.double()).abs() <= BOUND[dtype] * (1 + want.double().abs())).all())


def test_a_token_does_not_see_its_neighbours() -> None:
    case = InputCase(SHAPES[0], torch.float32, DEVICE)
    whole, _, _ = case.run(OURS)
    caches = [torch.zeros(4, 2, 64, 16, device=DEVICE) for _ in range(2)]
    heads = (part[2:4] for part in case.heads())
    slots = case.slots[2:4]
    part = OURS.qk_norm_rope_write(*heads, case.norm, case.cos_sin, case.positions[2:4], *caches, slots)
    assert torch.equal(part, whole[2:4])
