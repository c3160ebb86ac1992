"""Products of which both sides are in FP8, by the vendor's library: the fastest for many rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.linear.scaled import BLOCK, CODES, FP8_MAX, LEAST_AMAX, ScaledMatrix
from forkpoint.ops.linear.tiles import FEW_SCALED
from forkpoint.platforms.table import traits_of

ROWS = 64  # to a multiple of which rows are filled up: the library is slower with 32 than with 64
NARROW_ROWS = 16  # of one program
_MAX, _LEAST = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_AMAX)


@triton.jit
def narrowed(value):
    """Rows of fp32 in the range of FP8, and the scale of each."""
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), _LEAST) / _MAX
    return value / scale[:, None], scale


@triton.jit
def store_narrowed(value, codes, scales, rows, pieces, inside, width, padded_rows):
    """`value[P, BLOCK]`: P times BLOCK columns of a row, the `pieces`-th of it."""
    value, scale = narrowed(value)
    at = rows.to(tl.int64) * width + pieces * value.shape[1]
    code = value.to(codes.dtype.element_ty)
    tl.store(codes + at[:, None] + tl.arange(0, value.shape[1])[None, :], code, mask=inside[:, None])
    tl.store(scales + pieces.to(tl.int64) * padded_rows + rows, scale, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _narrow_kernel(
    x,
    codes,
    scales,
    num_rows,
    padded_rows,
    width,
    x_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`ROWS x WIDTH` elements; a row's have one scale. Rows from `num_rows` on are zeros."""
    await_inputs(OVERLAP)
    pieces = tl.cdiv(width, WIDTH)
    rows = tl.program_id(0) // pieces * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(0) % pieces
    columns = piece * WIDTH + tl.arange(0, WIDTH)
    inside, row = (columns < width)[None, :], rows.to(tl.int64)[:, None]
    there = (rows < num_rows)[:, None] & inside
    value = tl.load(x + row * x_stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
    value, scale = narrowed(value)
    tl.store(codes + row * width + columns[None, :], value.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + piece.to(tl.int64) * padded_rows + rows, scale)


class Rounded(Tensor):
    """A matrix, and the same as `narrow` would round it for products, by the launch that wrote it; what is beyond its
    rows is anything. What is made of it is a plain tensor."""

    codes: Tensor
    scales: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def room(cls, *shape: int, like: Tensor, rounded: bool) -> Tensor:
        """For `[M, K]`, or for the same with heads apart `[M, heads, K / heads]`; plain unless `rounded`, and where
        the device of `like` does not multiply FP8 by FP8, or not with rows of this width."""
        fits = shape[-1] % BLOCK == 0 and len(like) > FEW_SCALED and like.dtype == torch.bfloat16
        found = like.new_empty(shape)
        if not rounded or not fits or not traits_of(like.device).multiplies_fp8:
            return found
        own = found.as_subclass(cls)
        own.codes, own.scales = _empty(shape[0], math.prod(shape[1:]), BLOCK, ROWS, like.device)
        return own

    def flatten(self, *args: Any, **options: Any) -> Tensor:
        """With heads side by side."""
        found = super().flatten(*args, **options).as_subclass(Rounded)
        found.codes, found.scales = self.codes, self.scales
        return found


def written_beside(out: Tensor) -> tuple[Tensor | None, Tensor | None, int]:
    """What kernels write beside a matrix: codes, scales and the rows that those have room for."""
    return (out.codes, out.scales, out.codes.shape[0]) if isinstance(out, Rounded) else (None, None, 0)


@dataclass(frozen=True, slots=True)
class Activations:
    """`rows[M, K]`, and, if they are in FP8, a scale for each BLOCK columns of a row `[M, K / BLOCK]`."""

    rows: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, x: Tensor, narrows: bool) -> Activations:
        """x as it is, or rounded."""
        return cls(*narrow(x, BLOCK, NARROW_ROWS)) if narrows else cls(x, None)

    @classmethod
    def empty(cls, num_rows: int, width: int, like: Tensor, narrows: bool) -> Activations:
        """Of `like`'s dtype, or FP8; that with rows to spare, so that scales begin at a multiple of 16 bytes."""
        if not narrows:
            return cls(like.new_empty(num_rows, width), None)
        return cls(*_empty(num_rows, width, BLOCK, NARROW_ROWS, like.device))

    @property
    def scale_step(self) -> int:
        """From a row's scale to its next."""
        return 0 if self.scales is None else self.scales.stride(1)


def narrow(x: Tensor, columns: int, to_rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scales of `x[M, K]`, a scale for each row and `columns` of it, with M rounded up to a
    multiple of `to_rows`: `[M', K]`, `[M', K / columns]`, the latter column after column."""
    if isinstance(x, Rounded) and columns == BLOCK:
        return x.codes, x.scales
    num_rows, width = x.shape
    codes, scales = _empty(num_rows, width, columns, to_rows, x.device)
    padded, pieces = scales.shape
    block = triton.next_power_of_2(columns)
    rows = NARROW_ROWS if block == BLOCK else 1
    sizes = {"ROWS": rows, "WIDTH": block, "num_warps": 4, **overlap(x.device, num_rows)}
    _narrow_kernel[(padded // rows * pieces,)](x, codes, scales, num_rows, padded, width, x.stride(0), **sizes)
    return codes, scales


def _empty(num_rows: int, width: int, columns: int, to_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    padded, pieces = triton.cdiv(num_rows, to_rows) * to_rows, triton.cdiv(width, columns)
    codes = torch.empty(padded, width, dtype=CODES, device=device)
    return codes, torch.empty(pieces, padded, dtype=torch.float32, device=device).t()


def library_scales(weight: ScaledMatrix) -> Tensor | None:
    """The scales of `[N, K]` as the library wants them; None: it has no product for their blocks."""
    num_outputs, width = weight.shape
    if num_outputs % 16 or width % BLOCK or weight.dtype != torch.bfloat16:
        return None
    if not weight.by_block:
        return weight.scales.view(1, -1) if weight.rows == 1 else None
    if weight.rows != BLOCK or weight.columns != BLOCK:
        return None
    # Column after column, each of a length that is a multiple of four.
    rows, columns = weight.scales.shape
    padded = weight.scales.new_zeros(rows, triton.cdiv(columns, 4) * 4)
    padded[:, :columns] = weight.scales
    return padded.t()


def multiply_fp8(x: Tensor, weight: ScaledMatrix, scales: Tensor, bias: Tensor | None) -> Tensor:
    """`x[M, K] -> y[M, N]` in bfloat16; `scales` are `library_scales(weight)`. x is rounded to FP8, with a scale for
    each row, and each 128 columns of it where weights have one for each block."""
    kinds = F.ScalingType
    if weight.by_block:
        columns, recipes = BLOCK, (kinds.BlockWise1x128, kinds.BlockWise128x128)
    else:
        columns, recipes = x.shape[1], (kinds.RowWise, kinds.RowWise)
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, x_scales = narrow(x, columns)
    product: Any = F.scaled_mm
    y: Tensor = product(codes, weight.codes.t(), x_scales, recipes[0], scales, recipes[1], output_dtype=x.dtype)
    y = y[: x.shape[0]]
    return y if bias is None else y + bias
