"""Matrices in FP8 in every layout of scales, and widened."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.linear.scaled import ScaledMatrix, quantise

LAYOUTS = ["block", "row", "channel"]
CPU = torch.device("cpu")


def scaled(*shape: int, layout: str, dtype: torch.dtype, device: torch.device = CPU) -> ScaledMatrix:
    """Return a random FP8 matrix with scales by block, by row, or by row and block as joined matrices may have."""
    weight = torch.randn(*shape) * shape[-1] ** -0.5 * torch.exp(torch.randn(*shape[:-1], 1))
    made = quantise(weight.to(device, dtype))
    if layout == "block":
        return made
    if layout == "row":
        rows = made.by_row()
        return ScaledMatrix(rows.codes, rows.scales * torch.rand_like(rows.scales).add(0.5), 1, rows.columns, dtype)
    scales = torch.rand(*shape[:-1], 1, device=device) * 0.01
    return ScaledMatrix(made.codes, scales, 1, shape[-1], dtype)


def widened(matrix: ScaledMatrix) -> Tensor:
    return ScaledMatrix(matrix.codes, matrix.scales, matrix.rows, matrix.columns, torch.float32).dense().double()
