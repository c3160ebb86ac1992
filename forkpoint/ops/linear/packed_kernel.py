"""Products with weights in 4 bits in Triton. packed.py has the layout."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.linear.packed import PER_WORD, PackedMatrix
from forkpoint.ops.moe.order_kernel import ExpertOrder

# One tile for all shapes, because every K step of a row is then added in the same order.
OUTPUTS: Final = 64
WIDTH: Final = 64  # columns per step
FEW_ROWS: Final = 16  # rows of a tile for few rows; above, tiles of MANY_ROWS
MANY_ROWS: Final = 64
WIDEN_ROWS, WIDEN_WIDTH = tl.constexpr(32), tl.constexpr(128)
_PER_WORD = tl.constexpr(PER_WORD)


@triton.jit
def load_weights(words, scales, zeros, rows, columns, inside, width, group):
    """Return the elements `[R, C]` of rows and columns in fp32, without the factors of rows."""
    groups = tl.cdiv(width, group)
    at = rows.to(tl.int64)[:, None]
    word = tl.load(words + at * (width // _PER_WORD) + (columns // _PER_WORD)[None, :], mask=inside, other=0)
    code = (word >> (columns % _PER_WORD * 4)[None, :]) & 15
    scale_at = at * groups + (columns // group)[None, :]
    scale = tl.load(scales + scale_at, mask=inside, other=0.0).to(tl.float32)
    if zeros is None:
        magnitude = code & 7
        # four times the value: 0, 2, then a leading one and the bit of the mantissa, moved by the exponent
        quarters = tl.where(magnitude < 2, magnitude * 2, (2 + (magnitude & 1)) << (magnitude >> 1))
        value = tl.where(code > 7, -quarters, quarters).to(tl.float32) * 0.25
    else:
        zero = tl.load(zeros + scale_at, mask=inside, other=0).to(tl.int32)
        value = (code - zero).to(tl.float32)
    return value * scale


@triton.jit(do_not_specialize=["num_rows"])
def packed_product_kernel(
    x,
    words,
    scales,
    factors,
    zeros,
    bias,
    out,
    pairs,
    tiles,
    num_rows,
    num_outputs,
    width,
    group,
    x_stride,
    out_stride,
    choices,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTO: tl.constexpr,
):
    """Compute one tile of the product with a matrix, or with an expert's matrix if `tiles` is given.

    `tiles` and `pairs` come from `ExpertOrder`, and `num_rows` is the number of tiles. The product into experts (INTO)
    reads tokens, of `choices` pairs each, and writes places in the order of pairs. The product out of experts reads
    places and writes pairs."""
    pid = tl.program_id(0)
    output_tiles = tl.cdiv(num_outputs, OUTPUTS)
    tile = pid // output_tiles
    outputs = pid % output_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    outputs_inside = outputs < num_outputs
    matrix = 0
    if tiles is not None:
        begin, behind = tl.load(tiles + num_rows + tile), tl.load(tiles + 2 * num_rows + tile)
        if begin >= behind:
            return
        matrix = tl.load(tiles + tile)
        places = begin + tl.arange(0, ROWS)
        rows_inside = places < behind
        pair = tl.load(pairs + places, mask=rows_inside, other=0)
        rows, targets = places.to(tl.int64), pair.to(tl.int64)
        if INTO:
            rows, targets = (pair // choices).to(tl.int64), places.to(tl.int64)
    else:
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        rows_inside, targets = rows < num_rows, rows
    matrix_rows = matrix * num_outputs + outputs
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for k in range(0, width, WIDTH):
        columns = k + tl.arange(0, WIDTH)
        left = columns < width
        inside = outputs_inside[:, None] & left[None, :]
        weights = load_weights(words, scales, zeros, matrix_rows, columns, inside, width, group)
        x_at = (rows * x_stride)[:, None] + columns[None, :]
        values = tl.load(x + x_at, mask=rows_inside[:, None] & left[None, :], other=0.0)
        acc = tl.dot(values, tl.trans(weights.to(values.dtype)), acc, input_precision="ieee")
    acc *= tl.load(factors + matrix_rows, mask=outputs_inside, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + outputs, mask=outputs_inside, other=0.0).to(tl.float32)[None, :]
    line = targets[:, None] * out_stride + outputs[None, :]
    tl.store(out + line, acc.to(out.dtype.element_ty), mask=rows_inside[:, None] & outputs_inside[None, :])


@triton.jit
def widen_packed_kernel(words, scales, factors, zeros, out, num_rows, width, group):
    pieces = tl.cdiv(width, WIDEN_WIDTH)
    rows = tl.program_id(0) // pieces * WIDEN_ROWS + tl.arange(0, WIDEN_ROWS)
    columns = tl.program_id(0) % pieces * WIDEN_WIDTH + tl.arange(0, WIDEN_WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    value = load_weights(words, scales, zeros, rows, columns, inside, width, group)
    value *= tl.load(factors + rows, mask=rows < num_rows, other=0.0)[:, None]
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _tensors(matrix: PackedMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return matrix.words, matrix.scales, matrix.factors, matrix.zeros


def widen_packed(matrix: PackedMatrix) -> Tensor:
    """Return the widened matrix `[N, K]` in the order of its codes, as `PackedMatrix.dense` does."""
    num_rows, width = matrix.shape
    out = torch.empty(num_rows, width, dtype=matrix.dtype, device=matrix.words.device)
    programs = triton.cdiv(num_rows, WIDEN_ROWS.value) * triton.cdiv(width, WIDEN_WIDTH.value)
    widen_packed_kernel[(programs,)](*_tensors(matrix), out, num_rows, width, matrix.group)
    return out


def multiply_packed(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """Multiply `x[M, K]`, in the order of the weight's codes, by `weight[N, K]`; return `y[M, N]` in x's dtype."""
    out = x.new_empty(len(x), weight.shape[0])
    if len(x):
        rows = FEW_ROWS if len(x) <= FEW_ROWS else MANY_ROWS
        _launch(x, weight, out, triton.cdiv(len(x), rows), len(x), rows, bias=bias)
    return out


def multiply_experts(
    x: Tensor, weight: PackedMatrix, order: ExpertOrder, choices: int, rows: int, into: bool
) -> Tensor:
    """Multiply each pair's row of x by the matrix of its expert, `weight[E, N, K]`; return `[pairs, N]`.

    With `into`, `x[T, K]` are tokens and the result is in the order of experts. Otherwise x is in that order, and the
    result in the order of pairs."""
    out = x.new_empty(len(order.pairs), weight.shape[1])
    num_tiles = order.tiles.shape[1]
    _launch(x, weight, out, num_tiles, num_tiles, rows, order=order, choices=choices, into=into)
    return out


def _launch(
    x: Tensor,
    weight: PackedMatrix,
    out: Tensor,
    row_tiles: int,
    num_rows: int,
    rows: int,
    *,
    bias: Tensor | None = None,
    order: ExpertOrder | None = None,
    choices: int = 1,
    into: bool = False,
) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_outputs, width = weight.shape[-2:]
    pairs, tiles = (None, None) if order is None else (order.pairs, order.tiles)
    counts = (num_rows, num_outputs, width, weight.group, x.stride(0), out.stride(0), choices)
    sizes: dict[str, Any] = {"ROWS": rows, "OUTPUTS": OUTPUTS, "WIDTH": WIDTH, "INTO": into}
    programs = row_tiles * triton.cdiv(num_outputs, OUTPUTS)
    packed_product_kernel[(programs,)](x, *_tensors(weight), bias, out, pairs, tiles, *counts, **sizes, num_warps=4)
