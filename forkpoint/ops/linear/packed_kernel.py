"""Products with weights in 4 bits in Triton. packed.py has the layout."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.linear.packed import PER_WORD, PackedMatrix
from forkpoint.ops.moe.order_kernel import ExpertOrder


class PackedTile(NamedTuple):
    """The elements that a program computes, `rows x outputs`, and how it is launched.

    Every tile adds K in the same order, so the bits of a row do not depend on the tile.
    """

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


FEW: Final = PackedTile(rows=16, outputs=32, num_warps=4, num_stages=5)  # for as many rows as it has
MANY: Final = PackedTile(rows=128, outputs=128, num_warps=8, num_stages=3)
WIDTH: Final = 128  # columns of a step
WIDEN_ROWS: Final = 32
_PER_WORD = tl.constexpr(PER_WORD)
# The bits of 2^23 in fp32. With a code in its low bits, the number is 2^23 plus the code.
_BIAS_BITS, _BIAS = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)


@triton.jit
def _for_each_code(x):
    """Repeat each column of `x[R, WORDS]` for the codes of its word. A thread keeps what it has."""
    x = tl.interleave(x, x)
    x = tl.interleave(x, x)
    return tl.interleave(x, x)


@triton.jit
def load_weights(words, scales, zeros, rows, rows_inside, first, width, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Return `[R, WIDTH]` elements in fp32, without the factors of rows: `rows`, and the columns of the words from
    `first` on. Elements outside the matrix are zero.

    Each word is loaded once and each scale once for a word, or once for a row if the columns share a group."""
    WORDS: tl.constexpr = WIDTH // 8
    places = first + tl.arange(0, WORDS)
    inside = rows_inside[:, None] & (places < width // _PER_WORD)[None, :]
    at = rows.to(tl.int64)[:, None]
    word = tl.load(words + at * (width // _PER_WORD) + places[None, :], mask=inside, other=0)
    if GROUP % WIDTH == 0:
        scale_at = at * tl.cdiv(width, GROUP) + first * _PER_WORD // GROUP
        scale_inside = rows_inside[:, None] & (first < width // _PER_WORD)
    else:
        scale_at = at * tl.cdiv(width, GROUP) + (places * _PER_WORD // GROUP)[None, :]
        scale_inside = inside
    scale = tl.load(scales + scale_at, mask=scale_inside, other=0.0).to(tl.float32)
    code = (_for_each_code(word) >> (tl.arange(0, WIDTH) % _PER_WORD * 4)[None, :]) & 15
    if GROUP % WIDTH != 0:
        scale = _for_each_code(scale)
    if zeros is None:
        # In fp16 the same exponent and mantissa are a number 2^14 times as small.
        bits = (code & 7) << 9 | (code & 8) << 12
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        scale *= 16384.0
    else:
        zero = tl.load(zeros + scale_at, mask=scale_inside, other=0).to(tl.float32) + _BIAS
        if GROUP % WIDTH != 0:
            zero = _for_each_code(zero)
        value = (code | _BIAS_BITS).to(tl.float32, bitcast=True) - zero
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
    x_stride,
    out_stride,
    choices,
    GROUP: tl.constexpr,
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
        weights = load_weights(words, scales, zeros, matrix_rows, outputs_inside, k // _PER_WORD, width, GROUP, WIDTH)
        x_at = (rows * x_stride)[:, None] + columns[None, :]
        values = tl.load(x + x_at, mask=rows_inside[:, None] & (columns < width)[None, :], other=0.0)
        acc = tl.dot(values, tl.trans(weights.to(values.dtype)), acc, input_precision="ieee")
    acc *= tl.load(factors + matrix_rows, mask=outputs_inside, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + outputs, mask=outputs_inside, other=0.0).to(tl.float32)[None, :]
    line = targets[:, None] * out_stride + outputs[None, :]
    tl.store(out + line, acc.to(out.dtype.element_ty), mask=rows_inside[:, None] & outputs_inside[None, :])


@triton.jit
def widen_packed_kernel(
    words,
    scales,
    factors,
    zeros,
    out,
    num_rows,
    width,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write one tile of the widened matrix, each element rounded once."""
    pieces = tl.cdiv(width, WIDTH)
    rows = tl.program_id(0) // pieces * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % pieces * WIDTH
    rows_inside = rows < num_rows
    value = load_weights(words, scales, zeros, rows, rows_inside, start // _PER_WORD, width, GROUP, WIDTH)
    value *= tl.load(factors + rows, mask=rows_inside, other=0.0)[:, None]
    columns = start + tl.arange(0, WIDTH)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=rows_inside[:, None] & (columns < width)[None, :])


def _tensors(matrix: PackedMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return matrix.words, matrix.scales, matrix.factors, matrix.zeros


def widen_packed(matrix: PackedMatrix) -> Tensor:
    """Return the widened matrix `[N, K]` in the order of its codes, as `PackedMatrix.dense` does."""
    num_rows, width = matrix.shape
    out = torch.empty(num_rows, width, dtype=matrix.dtype, device=matrix.words.device)
    programs = triton.cdiv(num_rows, WIDEN_ROWS) * triton.cdiv(width, WIDTH)
    sizes: dict[str, Any] = {"GROUP": matrix.group, "ROWS": WIDEN_ROWS, "WIDTH": WIDTH}
    widen_packed_kernel[(programs,)](*_tensors(matrix), out, num_rows, width, **sizes)
    return out


def multiply_packed(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """Multiply `x[M, K]`, in the order of the weight's codes, by `weight[N, K]`; return `y[M, N]` in x's dtype."""
    out = x.new_empty(len(x), weight.shape[0])
    if len(x):
        tile = FEW if len(x) <= FEW.rows else MANY
        _launch(x, weight, out, triton.cdiv(len(x), tile.rows), len(x), tile, bias=bias)
    return out


def multiply_experts(
    x: Tensor, weight: PackedMatrix, order: ExpertOrder, choices: int, tile: PackedTile, into: bool
) -> Tensor:
    """Multiply each pair's row of x by the matrix of its expert, `weight[E, N, K]`; return `[pairs, N]`.

    With `into`, `x[T, K]` are tokens and the result is in the order of experts. Otherwise x is in that order, and the
    result in the order of pairs."""
    out = x.new_empty(len(order.pairs), weight.shape[1])
    num_tiles = order.tiles.shape[1]
    _launch(x, weight, out, num_tiles, num_tiles, tile, order=order, choices=choices, into=into)
    return out


def _launch(
    x: Tensor,
    weight: PackedMatrix,
    out: Tensor,
    row_tiles: int,
    num_rows: int,
    tile: PackedTile,
    *,
    bias: Tensor | None = None,
    order: ExpertOrder | None = None,
    choices: int = 1,
    into: bool = False,
) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_outputs, width = weight.shape[-2:]
    pairs, tiles = (None, None) if order is None else (order.pairs, order.tiles)
    counts = (num_rows, num_outputs, width, x.stride(0), out.stride(0), choices)
    sizes: dict[str, Any] = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "WIDTH": WIDTH, "INTO": into}
    sizes |= {"GROUP": weight.group, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    programs = row_tiles * triton.cdiv(num_outputs, tile.outputs)
    packed_product_kernel[(programs,)](x, *_tensors(weight), bias, out, pairs, tiles, *counts, **sizes)
