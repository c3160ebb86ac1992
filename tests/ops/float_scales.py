"""Matrices of 4-bit floats that have every scale, and factors far apart."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.linear.packed import FLOAT_GROUP, LEVELS, PER_WORD, PackedMatrix, unpack

NUM_SCALES = 127  # e4m3 numbers that are not negative: 0, 7 subnormal numbers, 119 others
PART = 8  # rows with one factor


def every_scale(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> PackedMatrix:
    """Return random codes, each e4m3 number as a scale, and a factor for each PART rows, of each matrix.

    Factors are powers of two from 2^-30 to 2^30, so all elements are exact in bfloat16.
    """
    *lead, num_rows, width = shape
    words = torch.randint(-(2**31), 2**31 - 1, (*lead, num_rows, width // PER_WORD), dtype=torch.int32)
    groups = torch.Size((*lead, num_rows, width // FLOAT_GROUP))
    assert groups.numel() >= NUM_SCALES, "each scale has a group"
    scales = (torch.randperm(groups.numel()) % NUM_SCALES).to(torch.uint8).view(groups)
    parts = torch.randint(-30, 31, (*lead, num_rows // PART, 1)).float()
    factors = torch.exp2(parts).repeat_interleave(PART, -2)
    return PackedMatrix(words.to(device), scales.to(device), factors.to(device), None, FLOAT_GROUP, dtype)


def exact(matrix: PackedMatrix) -> Tensor:
    """Return the elements `[..., N, K]` in float64, with the numbers of e4m3 computed from their bits."""
    exponent, mantissa = (matrix.scales >> 3).double(), (matrix.scales & 7).double()
    normal = (exponent > 0).double()
    scales = (normal + mantissa / 8) * torch.exp2(torch.where(exponent > 0, exponent, 1) - 7)
    codes = unpack(matrix.words)
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=codes.device)[(codes & 7).int()]
    values = torch.where(codes > 7, -levels, levels)
    return values * scales.repeat_interleave(matrix.group, -1) * matrix.factors.double()
