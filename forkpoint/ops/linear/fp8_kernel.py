"""Rounding activations to FP8, and FP8 x FP8 products by the vendor's library, which is fastest for many rows."""

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
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.platforms.table import traits_of

ROWS = 64  # rows are padded to a multiple, because the library is slower with 32 rows than with 64
NARROW_ROWS = 16  # rows per program that rounds
_MAX, _LEAST = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_AMAX)


@triton.jit
def narrowed(value):
    """Scale fp32 rows into the range of FP8; return them and each row's scale."""
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), _LEAST) / _MAX
    return value / scale[:, None], scale


@triton.jit
def store_narrowed(value, codes, scales, rows, pieces, inside, width, padded_rows):
    """Round and store `value[P, BLOCK]`, the pieces `pieces` of a row, each of BLOCK columns."""
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
    """Round `ROWS x WIDTH` elements with one scale per row. Rows from `num_rows` on are zeros."""
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
    """A matrix that carries its FP8 form, which the launch that wrote the matrix also wrote.

    The FP8 form equals that of `narrow`; rows beyond the matrix hold anything. Results of operations are plain
    tensors."""

    codes: Tensor
    scales: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def room(cls, *shape: int, like: Tensor, rounded: bool) -> Tensor:
        """Allocate `[M, K]`, or `[M, heads, K / heads]`.

        The tensor is plain unless `rounded` is set and the device multiplies FP8 by FP8 with rows of this width."""
        fits = shape[-1] % BLOCK == 0 and len(like) > FEW_SCALED and like.dtype == torch.bfloat16
        found = like.new_empty(shape)
        if not rounded or not fits or not traits_of(like.device).multiplies_fp8:
            return found
        own = found.as_subclass(cls)
        own.codes, own.scales = _empty(shape[0], math.prod(shape[1:]), BLOCK, ROWS, like.device)
        return own

    def flatten(self, *args: Any, **options: Any) -> Tensor:
        """Merge the heads of a token, and keep the FP8 form."""
        found = super().flatten(*args, **options).as_subclass(Rounded)
        found.codes, found.scales = self.codes, self.scales
        return found


def written_beside(out: Tensor) -> tuple[Tensor | None, Tensor | None, int]:
    """Return what kernels write in addition to a matrix: codes, scales, and the number of rows they have room for."""
    return (out.codes, out.scales, out.codes.shape[0]) if isinstance(out, Rounded) else (None, None, 0)


@dataclass(frozen=True, slots=True)
class Activations:
    """`rows[M, K]` and, if they are FP8, one scale for each BLOCK columns of a row, `[M, K / BLOCK]`."""

    rows: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, x: Tensor, narrows: bool) -> Activations:
        """Return x as it is, or rounded to FP8 if `narrows`."""
        return cls(*narrow(x, BLOCK, NARROW_ROWS)) if narrows else cls(x, None)

    @classmethod
    def empty(cls, num_rows: int, width: int, like: Tensor, narrows: bool) -> Activations:
        """Allocate in the dtype of `like`, or in FP8 with spare rows, so that scales start at a multiple of 16
        bytes."""
        if not narrows:
            return cls(like.new_empty(num_rows, width), None)
        return cls(*_empty(num_rows, width, BLOCK, NARROW_ROWS, like.device))

    @property
    def scale_step(self) -> int:
        """Stride from one scale of a row to the next."""
        return 0 if self.scales is None else self.scales.stride(1)


def narrow(x: Tensor, columns: int, to_rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Round `x[M, K]` to FP8 with one fp32 scale per row and `columns` columns.

    Returns codes `[M', K]` and scales `[M', K / columns]` in column-major order, with M' the next multiple of
    `to_rows`."""
    if isinstance(x, Rounded) and columns == BLOCK:
        return x.codes, x.scales
    num_rows, width = x.shape
    codes, scales = _empty(num_rows, width, columns, to_rows, x.device)
    padded, pieces = scales.shape
    block = next_power_of_2(columns)
    rows = NARROW_ROWS if block == BLOCK else 1
    sizes = {"ROWS": rows, "WIDTH": block, "num_warps": 4, **overlap(x.device, num_rows)}
    _narrow_kernel[(padded // rows * pieces,)](x, codes, scales, num_rows, padded, width, x.stride(0), **sizes)
    return codes, scales


def _empty(num_rows: int, width: int, columns: int, to_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    padded, pieces = ceil_div(num_rows, to_rows) * to_rows, ceil_div(width, columns)
    codes = torch.empty(padded, width, dtype=CODES, device=device)
    return codes, torch.empty(pieces, padded, dtype=torch.float32, device=device).t()


def library_scales(weight: ScaledMatrix) -> Tensor | None:
    """Return the scales of `[N, K]` in the library's layout, or None if it has no product for their blocks."""
    num_outputs, width = weight.shape
    if num_outputs % 16 or width % BLOCK or weight.dtype != torch.bfloat16:
        return None
    if not weight.by_block:
        return weight.scales.view(1, -1) if weight.rows == 1 else None
    if weight.rows != BLOCK or weight.columns != BLOCK:
        return None
    # Column-major, with columns padded to a multiple of four.
    rows, columns = weight.scales.shape
    padded = weight.scales.new_zeros(rows, ceil_div(columns, 4) * 4)
    padded[:, :columns] = weight.scales
    return padded.t()


def multiply_fp8(x: Tensor, weight: ScaledMatrix, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `x[M, K]` by an FP8 weight with the vendor's library; return `y[M, N]` in bfloat16.

    `scales` are `library_scales(weight)`. x is rounded to FP8 with one scale per row, or per row and 128 columns if the
    weight has a scale per block."""
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
