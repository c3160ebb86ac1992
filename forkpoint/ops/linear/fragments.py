"""Matrices in 4 bits in the order in which matrix units take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from forkpoint.ops.linear.packed import FLOAT_GROUP, MIDDLE, PackedMatrix, unpack

FRAGMENT: Final = 128  # columns whose codes are stored in an order of their own
STRIP: Final = 8  # rows that are stored side by side
# At its place in a bfloat16 number, a float code is a subnormal number, 2^126 times too small. Scales are stored times
# the first power of two and elements come out times the second, which keeps e4m3 scales and products in range.
SCALE_EXPONENT: Final = 117
FLOAT_EXPONENT: Final = SCALE_EXPONENT - 126
_PIECE_WORDS: Final = 1 << 24  # words reordered together, which bounds the memory
# The places in half a word of the sign and of the size of each pair's float codes.
_SIGNS, _SIZES = (15, 12, 14, 13), (6, 3, 0, 9)


@dataclass(frozen=True, slots=True)
class FragmentMatrix:
    """A bfloat16 matrix `[..., N, K]` of 4-bit codes, N a multiple of STRIP and K of FRAGMENT.

    `words[..., N / STRIP, K / FRAGMENT, 128]` int32: STRIP rows of FRAGMENT columns lie side by side, row by row, so
    that a warp loads 512 bytes in a row. Word `4 q + j` of a row holds the pairs p = 0 .. 3 of columns
    `16 (2 j + p // 2) + 4 q + 2 (p % 2)` and the next, one in each half. Integers, whose zero point is 8, have bits
    `[4 p, 4 p + 4)` of each half, and `scales[..., K / group, N]` fp16. Floats have a sign and three other bits
    (`_SIGNS`, `_SIZES`), and `scales[..., N / STRIP, K / FRAGMENT, 32]` int32, two bfloat16 numbers each: the scales of
    FLOAT_GROUP columns times 2^SCALE_EXPONENT. `factors[..., N]` fp32 multiplies rows. `order`: see PackedMatrix.
    """

    words: Tensor
    scales: Tensor
    factors: Tensor
    group: int
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """`[..., N, K]`."""
        return torch.Size((*self.factors.shape, self.words.shape[-2] * FRAGMENT))

    @property
    def floats(self) -> bool:
        """Whether codes are floats, not integers."""
        return self.group == FLOAT_GROUP


class FragmentLinear(NamedTuple):
    """A `[N, K]` weight in fragments and its optional `[N]` bias."""

    weight: FragmentMatrix
    bias: Tensor | None


class FragmentExperts(NamedTuple):
    """The `PackedExperts` of reference.py in fragments."""

    gate_up: FragmentMatrix
    down: FragmentMatrix

    @property
    def gated(self) -> bool:
        return self.gate_up.shape[1] != self.down.shape[2]


def fits_fragments(matrix: PackedMatrix) -> bool:
    """Return whether `in_fragments` supports the matrix."""
    if matrix.dtype != torch.bfloat16 or matrix.shape[-1] % FRAGMENT or matrix.shape[-2] % STRIP:
        return False
    if matrix.zeros is None:
        return matrix.group == FLOAT_GROUP
    whole = matrix.group % FRAGMENT == 0 and matrix.shape[-1] % matrix.group == 0
    return whole and bool((matrix.zeros == MIDDLE).all())


def in_fragments(matrix: PackedMatrix) -> FragmentMatrix:
    """Return the matrix in fragments. Its words are reordered a piece at a time."""
    floats, lines = matrix.zeros is None, matrix.words.contiguous().view(-1, matrix.words.shape[-1])
    *lead, num_rows, width = matrix.shape
    strips = (*lead, num_rows // STRIP, width // FRAGMENT, -1)
    words = torch.empty_like(lines)
    step = max(1, _PIECE_WORDS // (STRIP * lines.shape[1])) * STRIP
    for start in range(0, len(lines), step):
        piece = lines[start : start + step]
        words[start : start + step] = _side_by_side(_reordered(piece, floats), width // FRAGMENT).view_as(piece)
    if floats:
        halves = (matrix.scales.float() * 2.0**SCALE_EXPONENT).to(torch.bfloat16).contiguous()
        scales = _side_by_side(halves.view(torch.int32).view(len(lines), -1), width // FRAGMENT).view(strips)
    else:
        scales = matrix.scales.transpose(-2, -1).contiguous()
    factors = matrix.factors.squeeze(-1).contiguous()
    return FragmentMatrix(words.view(strips), scales, factors, matrix.group, matrix.order)


def _side_by_side(rows: Tensor, num_fragments: int) -> Tensor:
    """Return rows of F fragments `[R, F * W]` as `[R / STRIP, F, STRIP, W]`."""
    return rows.view(-1, STRIP, num_fragments, rows.shape[1] // num_fragments).transpose(1, 2).contiguous()


def _reordered(words: Tensor, floats: bool) -> Tensor:
    """Return the words `[R, K / 8]` of fragments, given words of eight neighbouring columns."""
    codes = unpack(words).view(len(words), -1, 4, 2, 4, 2, 2)  # fragment, j, p // 2, q, p % 2, half
    pairs = codes.permute(0, 1, 4, 2, 3, 5, 6).reshape(len(words), -1, 4, 2).to(torch.int32)  # word, p, half
    out = torch.zeros(len(words), words.shape[1], dtype=torch.int32, device=words.device)
    for p in range(4):
        for half in range(2):
            code = pairs[:, :, p, half]
            if floats:
                out |= ((code >> 3) << (_SIGNS[p] + 16 * half)) | ((code & 7) << (_SIZES[p] + 16 * half))
            else:
                out |= code << (4 * p + 16 * half)
    return out
