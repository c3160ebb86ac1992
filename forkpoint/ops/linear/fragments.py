"""Matrices in 4 bits in the order in which matrix units take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from forkpoint.ops.linear.packed import FLOAT_GROUP, MIDDLE, PackedMatrix, e4m3_numbers, unpack

FRAGMENT: Final = 128  # columns whose codes are stored in an order of their own
STRIP: Final = 8  # rows that are stored side by side
# At its place in a bfloat16 number, a float code is a subnormal number, 2^126 times too small. Scales are multiplied by
# the first power of two and elements come out times the second, which keeps e4m3 scales and products in range.
SCALE_EXPONENT: Final = 117
FLOAT_EXPONENT: Final = SCALE_EXPONENT - 126
# The bfloat16 number of any positive scale times 2^SCALE_EXPONENT has these upper four bits, and its lower four are 0.
SCALE_TOP: Final = 0x7000
_PIECE_WORDS: Final = 1 << 24  # words reordered together, which bounds the memory
# The place of each bit of a pair's float codes, from the lowest to the sign, in the word if the code is the first of
# the pair. Those of the second are 16 places further, round the end. One rotation moves all bits of a code to where a
# bfloat16 number has them, but for the first pair, of which only the lowest bit moves.
_PLACES: Final = ((14, 7, 8, 15), (4, 5, 6, 13), (0, 1, 2, 9), (10, 11, 12, 19))


@dataclass(frozen=True, slots=True)
class FragmentMatrix:
    """A bfloat16 matrix `[..., N, K]` of 4-bit codes, N a multiple of STRIP and K of FRAGMENT.

    `words[..., N / STRIP, K / FRAGMENT, 128]` int32: STRIP rows of FRAGMENT columns lie side by side, row by row, so
    that a warp loads 512 bytes in a row. Word `4 q + j` of a row holds the pairs p = 0 .. 3 of columns
    `16 (2 j + p // 2) + 4 q + 2 (p % 2)` and the next, one in each half. Integers, whose zero point is 8, have bits
    `[4 p, 4 p + 4)` of each half, and `scales[..., K / group, N]` fp16. Floats have their bits in `_PLACES`, and
    `scales[..., N / STRIP, K / FRAGMENT, 32]` int16, two bytes each. A byte b is the scale of FLOAT_GROUP columns:
    `SCALE_TOP + 16 b` are the bits of a bfloat16 number, the scale times 2^SCALE_EXPONENT. Where a scale is 0,
    its codes are 0 too. `factors[..., N]` fp32 multiplies rows. `order`: see PackedMatrix.
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
        if floats:
            nonzero = matrix.scales.reshape(len(lines), -1)[start : start + step] != 0
            piece = (piece.view(*nonzero.shape, -1) * nonzero[..., None]).view_as(piece)
        words[start : start + step] = _side_by_side(_reordered(piece, floats), width // FRAGMENT).view_as(piece)
    if floats:
        bits = (e4m3_numbers(lines.device) * 2.0**SCALE_EXPONENT).view(torch.int32) >> 20
        own = (bits - (SCALE_TOP >> 4)).to(torch.uint8)[matrix.scales.int()]
        scales = _side_by_side(own.view(torch.int16).view(len(lines), -1), width // FRAGMENT).view(strips)
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
            if not floats:
                out |= code << (4 * p + 16 * half)
                continue
            for bit, place in enumerate(_PLACES[p]):
                out |= (code >> bit & 1) << (place + 16 * half) % 32
    return out
