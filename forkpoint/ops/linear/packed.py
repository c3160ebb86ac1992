"""Matrices in 4 bits with a scale for each group of columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

PER_WORD: Final = 8  # codes in one word
MIDDLE: Final = 8  # zero point of a symmetric group of integers
# The values of float codes (e2m1): a sign, two bits of exponent and one of mantissa.
LEVELS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT_GROUP: Final = 16  # columns that share a scale of float codes
_SCALE_MAX: Final = 448.0  # largest e4m3 number
_PIECE_ROWS: Final = 1024  # rows widened together, which bounds the memory
_HALF_EXPONENT: Final = 15  # a row's largest scale is moved below 2 to this power if fp16 cannot hold it


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix `[..., N, K]` of 4-bit codes.

    `words[..., N, K / 8]` int32 holds the code of column `8 w + i` in bits `[4 i, 4 i + 4)` of word w. `group`
    neighbouring columns of a row, a multiple of 8, share `scales[..., N, ceil(K / group)]` fp16. Each row has a factor
    `factors[..., N, 1]` fp32. An element is `(code - zero) * scale * factor` with `zeros` uint8, shaped like the
    scales. Without zeros, codes are floats (`LEVELS`) and scales are uint8, the bytes of e4m3 numbers below 128, which
    are not negative. `order[K]` is the column that each column of codes belongs to; None: its own. `dtype` is the dtype
    of products with the matrix. All tensors are contiguous, as kernels expect.
    """

    words: Tensor
    scales: Tensor
    factors: Tensor
    zeros: Tensor | None
    group: int
    dtype: torch.dtype
    order: Tensor | None = None

    def __post_init__(self) -> None:
        kept = (self.words, self.scales, self.factors, self.zeros)
        assert all(each is None or each.is_contiguous() for each in kept), "kernels read rows that lie side by side"

    @property
    def shape(self) -> torch.Size:
        """`[..., N, K]`."""
        *lead, width = self.words.shape
        return torch.Size((*lead, width * PER_WORD))

    def __getitem__(self, index: Any) -> PackedMatrix:
        """Index the leading dims, or rows."""
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(
            self, words=self.words[index], scales=self.scales[index], factors=self.factors[index], zeros=zeros
        )

    def dense(self) -> Tensor:
        """Return the widened matrix in `dtype`, each element rounded once."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.words.device)
        if self.words.dim() > 2:
            for i, part in enumerate(out):
                part.copy_(self[i].dense())
            return out
        for start in range(0, len(out), _PIECE_ROWS):  # in pieces, because the fp32 copy is eight times as large
            rows = slice(start, start + _PIECE_ROWS)
            wide = self[rows]._values()
            out[rows] = wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)
        return out

    def _values(self) -> Tensor:
        """Return the elements in fp32, in the order of the codes."""
        codes, width = unpack(self.words), self.shape[-1]
        if self.zeros is None:
            levels = torch.tensor((*LEVELS, *(-level for level in LEVELS)), device=codes.device)
            wide, scales = levels[codes.int()], e4m3_numbers(codes.device)[self.scales.int()]
        else:
            wide = codes.float() - self.zeros.float().repeat_interleave(self.group, -1)[..., :width]
            scales = self.scales.float()
        wide *= scales.repeat_interleave(self.group, -1)[..., :width]
        return wide.mul_(self.factors)

    def take_rows(self, order: Tensor) -> PackedMatrix:
        """Return rows `order[N]` of a `[N, K]` matrix."""
        return self[order]

    def take_columns(self, start: int, end: int) -> PackedMatrix:
        """Return columns `[start, end)`, multiples of 8, of a matrix whose columns are in order."""
        assert self.order is None and start % PER_WORD == end % PER_WORD == 0, "columns are taken as whole words"
        same = self.regrouped(gcd(self.group, start, end))
        own = slice(start // same.group, -(-end // same.group))
        zeros = None if same.zeros is None else same.zeros[..., own].contiguous()
        words = same.words[..., start // PER_WORD : end // PER_WORD].contiguous()
        return replace(same, words=words, scales=same.scales[..., own].contiguous(), zeros=zeros)

    def regrouped(self, group: int) -> PackedMatrix:
        """Return the same matrix with groups of `group` columns, a divisor of its own."""
        assert self.group % group == 0, "groups are only split"
        times, count = self.group // group, -(-self.shape[-1] // group)
        if times == 1:
            return self
        scales, zeros = self.scales.repeat_interleave(times, -1)[..., :count].contiguous(), self.zeros
        if zeros is not None:
            zeros = zeros.repeat_interleave(times, -1)[..., :count].contiguous()
        return replace(self, scales=scales, zeros=zeros, group=group)

    def joins(self, other: PackedMatrix) -> bool:
        """Return whether `joined` supports the other matrix."""
        same = self.group == other.group and self.dtype == other.dtype and self.order is None and other.order is None
        return same and (self.zeros is None) == (other.zeros is None)

    def joined(self, other: PackedMatrix) -> PackedMatrix:
        """Return the rows of `[N, K]` and then those of another matrix."""
        zeros = None if self.zeros is None or other.zeros is None else torch.cat((self.zeros, other.zeros))
        words, scales = torch.cat((self.words, other.words)), torch.cat((self.scales, other.scales))
        return replace(self, words=words, scales=scales, factors=torch.cat((self.factors, other.factors)), zeros=zeros)

    def multiplied(self, by: float | Tensor) -> PackedMatrix:
        """Multiply every row by one factor, or each row by its own of `by[N, 1]` fp32."""
        return replace(self, factors=self.factors * by)


class FourBitLinear(NamedTuple):
    """A `[N, K]` weight in 4 bits and its optional `[N]` bias."""

    weight: PackedMatrix
    bias: Tensor | None


class FourBitExperts(NamedTuple):
    """The `PackedExperts` of reference.py in 4 bits."""

    gate_up: PackedMatrix
    down: PackedMatrix

    @property
    def gated(self) -> bool:
        return self.gate_up.shape[1] != self.down.shape[2]


def pack(codes: Tensor) -> Tensor:
    """Pack codes `[..., K]` uint8 below 16 into int32 words `[..., K / 8]`."""
    pairs = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return pairs.contiguous().view(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Return the codes `[..., K]` uint8 of int32 words `[..., K / 8]`, in the order that `pack` reads them."""
    # flattened, because a tensor with a dimension of 1 may be contiguous although its last stride is not 1
    pairs = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def e4m3_numbers(device: torch.device) -> Tensor:
    """Return the e4m3 number of each byte in fp32 `[256]`, on any device, because not all have such numbers."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def halved(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Split scales `[..., N, G]` into fp16 numbers and a fp32 factor of each row `[..., N, 1]`.

    The factor is 1 where fp16 holds all scales exactly, and a power of two otherwise.
    """
    wide = scales.float()
    half = wide.half()
    exact = bool((half.float() == wide).all())
    factors = torch.ones_like(wide[..., :1])
    if exact:
        return half, factors
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    factors = torch.exp2(largest.log2().floor() + 1 - _HALF_EXPONENT)
    return (wide / factors).half(), factors


def quantise_packed(matrix: Tensor, group: int) -> PackedMatrix:
    """Quantise `[..., N, K]` to symmetric 4-bit integers. K is a multiple of `group`."""
    grouped = matrix.float().view(*matrix.shape[:-1], -1, group)
    scales, factors = halved((grouped.abs().amax(-1) / 7).clamp_min(1e-7))
    codes = (grouped / (scales.float() * factors)[..., None]).round().clamp(-8, 7) + MIDDLE
    zeros = torch.full_like(scales, MIDDLE, dtype=torch.uint8)
    return PackedMatrix(pack(codes.flatten(-2).to(torch.uint8)), scales, factors, zeros, group, matrix.dtype)


def quantise_floats(matrix: Tensor) -> PackedMatrix:
    """Quantise `[..., N, K]` to 4-bit floats, as NVFP4 does: e4m3 scales and one factor for the whole matrix."""
    width = matrix.shape[-1]
    padded = torch.nn.functional.pad(matrix.float(), (0, -width % FLOAT_GROUP))
    grouped = padded.view(*matrix.shape[:-1], -1, FLOAT_GROUP)
    largest = grouped.abs().amax(-1) / LEVELS[-1]
    factor = (largest.max() / _SCALE_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales = (largest / factor).to(torch.float8_e4m3fn)
    sizes = grouped.abs() / (scales.float() * factor).clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    levels = torch.tensor(LEVELS, device=matrix.device)
    codes = torch.bucketize(sizes, (levels[1:] + levels[:-1]) / 2) | ((grouped < 0).int() << 3)
    factors = factor.expand(*matrix.shape[:-1], 1).contiguous()
    words = pack(codes.flatten(-2)[..., :width].to(torch.uint8))
    return PackedMatrix(words, scales.view(torch.uint8), factors, None, FLOAT_GROUP, matrix.dtype)
