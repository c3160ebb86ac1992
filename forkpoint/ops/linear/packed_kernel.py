"""Products with weights in 4 bits in Triton. packed.py has the layout."""

from __future__ import annotations

from math import gcd
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.linear.packed import PER_WORD, PackedMatrix
from forkpoint.ops.moe.order_kernel import ExpertOrder, rows_of_tile
from forkpoint.ops.rounding import ceil_div
from forkpoint.platforms.table import traits_of


class PackedTile(NamedTuple):
    """The elements that a program computes, `rows x outputs`, and how it is launched.

    Every tile adds K in the same order, so the bits of a row do not depend on the tile.
    """

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


FEW: Final = PackedTile(rows=16, outputs=32, num_warps=4, num_stages=4)  # for as many rows as it has
FEW_OF_EXPERTS: Final = PackedTile(rows=16, outputs=64, num_warps=4, num_stages=4)
MEDIUM: Final = PackedTile(rows=32, outputs=64, num_warps=4, num_stages=4)
MEDIUM_ROWS: Final = 64  # up to here MEDIUM is faster than MANY
MANY: Final = PackedTile(rows=64, outputs=128, num_warps=4, num_stages=3)
WIDTH: Final = 128  # columns of a step, or fewer if a group of integers has fewer
NARROWEST: Final = 32
WIDEN_ROWS: Final = 32
_PER_WORD = tl.constexpr(PER_WORD)
# Float codes times this number and their scales (e4m3) are exact in bfloat16 and in fp16.
_FLOAT_SCALE: Final = tl.constexpr(2.0**-9)
_TO_SCALE: Final = tl.constexpr(2.0**125)  # _FLOAT_SCALE times 2^134


# Assembler for one word of integer codes. Bits 0x4300 before a code make the bfloat16 number 128 + code, two at a time,
# and `$9` holds 128 + zero twice.
_INTEGERS = tl.constexpr("""
{
.reg .b32 %w<4>, %t, %code, %bias;
mov.b32 %code, 0x000F000F;
mov.b32 %bias, 0x43004300;
lop3.b32 %w0, $8, %code, %bias, 0xEA;
shr.u32 %t, $8, 4;
lop3.b32 %w1, %t, %code, %bias, 0xEA;
shr.u32 %t, $8, 8;
lop3.b32 %w2, %t, %code, %bias, 0xEA;
shr.u32 %t, $8, 12;
lop3.b32 %w3, %t, %code, %bias, 0xEA;
sub.rn.bf16x2 %w0, %w0, $9;
sub.rn.bf16x2 %w1, %w1, $9;
sub.rn.bf16x2 %w2, %w2, $9;
sub.rn.bf16x2 %w3, %w3, $9;
mov.b32 {$0, $4}, %w0;
mov.b32 {$1, $5}, %w1;
mov.b32 {$2, $6}, %w2;
mov.b32 {$3, $7}, %w3;
}
""")
# Assembler for one word of float codes. At its place in a bfloat16 number a code is a subnormal number, 2^126 times too
# small. `$9` holds the scale times 2^117, which is _FLOAT_SCALE times 2^126, twice.
_FLOATS = tl.constexpr("""
{
.reg .b32 %w<4>, %t, %sign, %size;
mov.b32 %sign, 0x80008000;
mov.b32 %size, 0x01C001C0;
shl.b32 %t, $8, 12;
and.b32 %w0, %t, %sign;
shl.b32 %t, $8, 6;
lop3.b32 %w0, %t, %size, %w0, 0xEA;
shl.b32 %t, $8, 8;
and.b32 %w1, %t, %sign;
shl.b32 %t, $8, 2;
lop3.b32 %w1, %t, %size, %w1, 0xEA;
shl.b32 %t, $8, 4;
and.b32 %w2, %t, %sign;
shr.u32 %t, $8, 2;
lop3.b32 %w2, %t, %size, %w2, 0xEA;
and.b32 %w3, $8, %sign;
shr.u32 %t, $8, 6;
lop3.b32 %w3, %t, %size, %w3, 0xEA;
mul.rn.bf16x2 %w0, %w0, $9;
mul.rn.bf16x2 %w1, %w1, $9;
mul.rn.bf16x2 %w2, %w2, $9;
mul.rn.bf16x2 %w3, %w3, $9;
mov.b32 {$0, $4}, %w0;
mov.b32 {$1, $5}, %w1;
mov.b32 {$2, $6}, %w2;
mov.b32 {$3, $7}, %w3;
}
""")
# Assembler that makes `$9` of floats from the byte of a scale. Moved by four places, its bits are those of a bfloat16
# number that is 2^120 times too small.
_SCALES = tl.constexpr("""
{
.reg .b32 %t, %by;
mul.lo.u32 %t, $1, 0x00100010;
mov.b32 %by, 0x7B007B00;
mul.rn.bf16x2 %t, %t, %by;
mov.b32 %by, 0x7A807A80;
mul.rn.bf16x2 $0, %t, %by;
}
""")


@triton.jit
def _for_each_code(x):
    """Repeat each column of `x[R, WORDS]` for the codes of its word. A thread keeps what it has."""
    x = tl.interleave(x, x)
    x = tl.interleave(x, x)
    return tl.interleave(x, x)


@triton.jit
def _by_bits(code: tl.constexpr, words, beside):
    """Run an assembler on `words[R, WORDS]` and `beside`, of the same shape. Returns bfloat16 `[R, 8 WORDS]`."""
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        code,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, beside],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    even = tl.interleave(tl.interleave(a, e), tl.interleave(c, g))
    odd = tl.interleave(tl.interleave(b, f), tl.interleave(d, h))
    # The copy costs nothing. Triton 3.6 and 3.7 fail to compile a product of a tensor that was reshaped last.
    joined = tl.interleave(even, odd)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [joined], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _load_for_words(numbers, rows, first, width, GROUP: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load what the words `[R, WIDTH / 8]` from `first` on have of `numbers`, one for each group: each number once."""
    groups = tl.cdiv(width, GROUP)
    at = rows.to(tl.int64)[:, None] * groups + first * _PER_WORD // GROUP
    if GROUP % WIDTH == 0:
        return tl.load(numbers + at)
    elif WIDTH % GROUP == 0 and (GROUP == 16 or GROUP == 32):
        places = tl.arange(0, WIDTH // GROUP)[None, :]
        if EVEN:
            found = tl.load(numbers + at + places)
        else:
            found = tl.load(numbers + at + places, mask=first * _PER_WORD // GROUP + places < groups, other=0)
        found = tl.interleave(found, found)
        return found if GROUP == 16 else tl.interleave(found, found)
    else:
        places = first + tl.arange(0, WIDTH // 8)[None, :]
        at = rows.to(tl.int64)[:, None] * groups + places * _PER_WORD // GROUP
        return tl.load(numbers + at, mask=places < width // _PER_WORD, other=0)


@triton.jit
def load_codes(
    words,
    scales,
    zeros,
    rows,
    first,
    width,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return `[R, WIDTH]` exact bfloat16 numbers: `rows`, and the columns of the words from `first` on.

    They are integers less their zero points, or floats times their scales and _FLOAT_SCALE. Columns beyond `width` have
    any finite number; with EVEN there are none. Each word is loaded once, and with BITS unpacked two codes at a time.
    """
    places = first + tl.arange(0, WIDTH // 8)[None, :]
    at = words + rows.to(tl.int64)[:, None] * (width // _PER_WORD) + places
    if EVEN:
        word = tl.load(at)
    else:
        word = tl.load(at, mask=places < width // _PER_WORD, other=0)
    beside = _load_for_words(scales if zeros is None else zeros, rows, first, width, GROUP, WIDTH, EVEN)
    if BITS:
        if zeros is None:
            pairs = tl.inline_asm_elementwise(
                _SCALES, "=r,r", [beside.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
            )
            return _by_bits(_FLOATS, word, tl.broadcast_to(pairs, word.shape))
        else:
            pairs = beside.to(tl.int32) * 0x10001 + 0x43004300
            return _by_bits(_INTEGERS, word, tl.broadcast_to(pairs, word.shape))
    code = (_for_each_code(word) >> (tl.arange(0, WIDTH) % _PER_WORD * 4)[None, :]) & 15
    if zeros is None:
        # In fp16 the same exponent and mantissa are a number 2^14 times as small, and in fp32 those of a scale 2^120.
        bits = (code & 7) << 9 | (code & 8) << 12
        scale = (beside.to(tl.int32) << 20).to(tl.float32, bitcast=True) * _TO_SCALE
        scale = _for_each_code(tl.broadcast_to(scale, word.shape))
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * scale
    else:
        value = code.to(tl.float32) - _for_each_code(tl.broadcast_to(beside.to(tl.float32), word.shape))
    return value.to(tl.bfloat16)


@triton.jit
def load_scales(scales, rows, first, width, GROUP: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Return the scales in fp32 `[R, WIDTH]` of the elements that `load_codes` returns."""
    found = _load_for_words(scales, rows, first, width, GROUP, WIDTH, EVEN).to(tl.float32)
    return _for_each_code(tl.broadcast_to(found, (found.shape[0], WIDTH // 8)))


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
    EVEN: tl.constexpr,
    BITS: tl.constexpr,
):
    """Compute one tile of the product with a matrix, or with an expert's matrix if `tiles` is given.

    `tiles` and `pairs` come from `ExpertOrder`, and `num_rows` is the number of tiles. `rows_of_tile` has INTO and
    `choices`."""
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
        rows, targets, rows_inside = rows_of_tile(pairs, begin, behind, choices, ROWS, INTO)
    else:
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        rows_inside, targets = rows < num_rows, rows
        rows = tl.minimum(rows, num_rows - 1)
    # Rows and outputs outside repeat the last one. They are not stored.
    matrix_rows = matrix * num_outputs + tl.minimum(outputs, num_outputs - 1)
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    columns = tl.arange(0, WIDTH)[None, :]
    x += (rows * x_stride)[:, None] + columns
    scale_at = scales + matrix_rows.to(tl.int64) * tl.cdiv(width, GROUP)
    for k in range(0, width, WIDTH):
        first = k // _PER_WORD
        codes = load_codes(words, scales, zeros, matrix_rows, first, width, GROUP, WIDTH, EVEN, BITS)
        if EVEN:
            values = tl.load(x + k)
        else:
            values = tl.load(x + k, mask=columns < width - k, other=0.0)
        if zeros is None:
            acc = tl.dot(values, tl.trans(codes.to(values.dtype)), acc, input_precision="ieee")
        elif GROUP % WIDTH == 0:
            part = tl.dot(values, tl.trans(codes.to(values.dtype)), input_precision="ieee")
            acc += part * tl.load(scale_at + k // GROUP).to(tl.float32)[None, :]
        else:
            weights = codes.to(tl.float32) * load_scales(scales, matrix_rows, first, width, GROUP, WIDTH, EVEN)
            acc = tl.dot(values, tl.trans(weights.to(values.dtype)), acc, input_precision="ieee")
    factor = tl.load(factors + matrix_rows)
    if zeros is None:
        factor /= _FLOAT_SCALE
    acc *= factor[None, :]
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
    EVEN: tl.constexpr,
    BITS: tl.constexpr,
):
    """Write one tile of the widened matrix, each element rounded once."""
    pieces = tl.cdiv(width, WIDTH)
    rows = tl.program_id(0) // pieces * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % pieces * WIDTH
    rows_inside = rows < num_rows
    first = start // _PER_WORD
    own = tl.minimum(rows, num_rows - 1)
    codes = load_codes(words, scales, zeros, own, first, width, GROUP, WIDTH, EVEN, BITS).to(tl.float32)
    factor = tl.load(factors + own)
    if zeros is None:
        value = codes * (factor / _FLOAT_SCALE)[:, None]
    else:
        value = codes * load_scales(scales, own, first, width, GROUP, WIDTH, EVEN) * factor[:, None]
    columns = start + tl.arange(0, WIDTH)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=rows_inside[:, None] & (columns < width)[None, :])


def _by_pairs(matrix: PackedMatrix) -> bool:
    """Return whether kernels unpack two codes at a time, in assembler."""
    return traits_of(matrix.words.device).multiplies_fp8


def _tensors(matrix: PackedMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return matrix.words, matrix.scales, matrix.factors, matrix.zeros


def widen_packed(matrix: PackedMatrix) -> Tensor:
    """Return the widened matrix `[..., N, K]` in the order of its codes, as `PackedMatrix.dense` does."""
    num_rows, width = matrix.shape[:-1].numel(), matrix.shape[-1]
    out = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.words.device)
    programs = ceil_div(num_rows, WIDEN_ROWS) * ceil_div(width, WIDTH)
    sizes: dict[str, Any] = {"GROUP": matrix.group, "ROWS": WIDEN_ROWS, "WIDTH": WIDTH}
    sizes |= {"EVEN": width % WIDTH == 0, "BITS": _by_pairs(matrix)}
    widen_packed_kernel[(programs,)](*_tensors(matrix), out, num_rows, width, **sizes)
    return out


def multiply_packed(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """Multiply `x[M, K]`, in the order of the weight's codes, by `weight[N, K]`; return `y[M, N]` in x's dtype."""
    out = x.new_empty(len(x), weight.shape[0])
    if len(x):
        tile = FEW if len(x) <= FEW.rows else MEDIUM if len(x) <= MEDIUM_ROWS else MANY
        _launch(x, weight, out, ceil_div(len(x), tile.rows), len(x), tile, bias=bias)
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
    step = WIDTH if weight.zeros is None else gcd(WIDTH, weight.group)
    if step < NARROWEST:
        step = WIDTH
    sizes: dict[str, Any] = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "WIDTH": step, "INTO": into}
    sizes |= {
        "EVEN": width % step == 0,
        "GROUP": weight.group,
        "BITS": _by_pairs(weight),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    programs = row_tiles * ceil_div(num_outputs, tile.outputs)
    packed_product_kernel[(programs,)](x, *_tensors(weight), bias, out, pairs, tiles, *counts, **sizes)
