"""Norm, rotation and write of projected heads on a CPU, against plain arithmetic in fp64."""

from __future__ import annotations

import pytest
import torch

from forkpoint.ops.select import torch_table
from tests.ops.cpu_table import cpp
from tests.ops.input_cases import SHAPES, InputCase, InputShape

BOUND = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_follow_plain_arithmetic(shape: InputShape, dtype: torch.dtype, backend: str) -> None:
    ops = cpp() if backend == "cpp" else torch_table()
    case = InputCase(shape, dtype)
    for got, want in zip(case.run(ops), case.wanted(), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert bool(((got.double() - want).abs() <= BOUND[dtype] * (1 + want.abs())).all())
