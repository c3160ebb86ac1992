"""Fragments of weights in 4 bits, widened in registers, in Triton. fragments.py has the layout."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.linear.fragments import FLOAT_EXPONENT, FRAGMENT, SCALE_TOP, STRIP, FragmentMatrix
from forkpoint.ops.linear.packed import FLOAT_GROUP, MIDDLE
from forkpoint.ops.rounding import ceil_div
from forkpoint.platforms.table import traits_of

WIDTH: Final = tl.constexpr(FRAGMENT)
STRIP_ROWS: Final = tl.constexpr(STRIP)
WORDS: Final = tl.constexpr(FRAGMENT // 8)  # words of a row of a fragment
PAIRS: Final = tl.constexpr(FRAGMENT // 32)  # pairs of its scales, for floats
GROUP_OF_FLOATS: Final = tl.constexpr(FLOAT_GROUP)
FLOAT_FACTOR: Final = tl.constexpr(2.0**-FLOAT_EXPONENT)  # sums of products with floats are multiplied by it
WIDEN_ROWS: Final = 32
_ZERO: Final = tl.constexpr(MIDDLE)
_SCALE_TOP: Final = tl.constexpr(SCALE_TOP)

# Assembler for one word of integer codes. Bits 0x4300 before a code make the bfloat16 number 128 + code, two at a time.
_INTEGERS = tl.constexpr("""
{
.reg .b32 %w<4>, %t, %code, %bias, %zero;
mov.b32 %code, 0x000F000F;
mov.b32 %bias, 0x43004300;
mov.b32 %zero, 0x43084308;
lop3.b32 %w0, $8, %code, %bias, 0xEA;
shr.u32 %t, $8, 4;
lop3.b32 %w1, %t, %code, %bias, 0xEA;
shr.u32 %t, $8, 8;
lop3.b32 %w2, %t, %code, %bias, 0xEA;
shr.u32 %t, $8, 12;
lop3.b32 %w3, %t, %code, %bias, 0xEA;
sub.rn.bf16x2 %w0, %w0, %zero;
sub.rn.bf16x2 %w1, %w1, %zero;
sub.rn.bf16x2 %w2, %w2, %zero;
sub.rn.bf16x2 %w3, %w3, %zero;
mov.b32 {$0, $1}, %w0;
mov.b32 {$2, $3}, %w1;
mov.b32 {$4, $5}, %w2;
mov.b32 {$6, $7}, %w3;
}
""")
# Assembler for one word of float codes, the first ($8) or second ($9) of two. At their places in a bfloat16 number, the
# bits of a code are a subnormal number, 2^126 times too small.
_FLOAT_WORD: Final = """
mov.b32 %low, {{{low}, {low}}};
mov.b32 %high, {{{high}, {high}}};
and.b32 %w0, {word}, 0x81808180;
shr.u32 %t, {word}, 8;
lop3.b32 %w0, %t, 0x00400040, %w0, 0xEA;
shl.b32 %t, {word}, 2;
and.b32 %w1, %t, %all;
shl.b32 %t, {word}, 6;
and.b32 %w2, %t, %all;
shf.r.wrap.b32 %t, {word}, {word}, 4;
and.b32 %w3, %t, %all;
mul.rn.bf16x2 {a}, %w0, %low;
mul.rn.bf16x2 {b}, %w1, %low;
mul.rn.bf16x2 {c}, %w2, %high;
mul.rn.bf16x2 {d}, %w3, %high;
"""
# Assembler for two words of float codes and the two bytes of scales of each ($10). `%even` has the first scale of both
# words and `%odd` the second. A product reads half of a register for both of its numbers, which takes no instruction.
_FLOATS = tl.constexpr(
    """
{
.reg .b32 %w<4>, %t, %all, %byte, %top, %even, %odd, %low, %high;
.reg .b16 %a, %b, %c, %d;
mov.b32 %all, 0x81C081C0;
mov.b32 %byte, 0x0FF00FF0;
mov.b32 %top, 0x70007000;
shl.b32 %t, $10, 4;
lop3.b32 %even, %t, %byte, %top, 0xEA;
shr.u32 %t, $10, 4;
lop3.b32 %odd, %t, %byte, %top, 0xEA;
mov.b32 {%a, %b}, %even;
mov.b32 {%c, %d}, %odd;
"""
    + _FLOAT_WORD.format(word="$8", low="%a", high="%c", a="$0", b="$2", c="$4", d="$6")
    + _FLOAT_WORD.format(word="$9", low="%b", high="%d", a="$1", b="$3", c="$5", d="$7")
    + "}"
)


@triton.jit
def _halves(pair):
    return tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(tl.bfloat16,) * 2, is_pure=True, pack=1
    )


@triton.jit
def _plain_integer(word, shift: tl.constexpr):
    return (((word >> shift) & 15).to(tl.float32) - _ZERO).to(tl.bfloat16)


@triton.jit
def _plain_float(word, scale, low_at: tl.constexpr, high_at: tl.constexpr, sign_at: tl.constexpr):
    bits = (word >> sign_at & 1) << 31 | (word >> high_at & 3) << 23 | (word >> low_at & 1) << 22
    return (bits.to(tl.float32, bitcast=True) * scale).to(tl.bfloat16)


@triton.jit
def _codes(word, beside, FLOATS: tl.constexpr, BITS: tl.constexpr):
    """Return eight bfloat16 tensors, the weights of each word in the order of its columns.

    `beside` int16 holds the two scales of each word of floats."""
    if BITS:
        if FLOATS:
            first, second, third, fourth = tl.inline_asm_elementwise(
                _FLOATS,
                "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
                [word, beside],
                dtype=(tl.int32,) * 4,
                is_pure=True,
                pack=2,
            )
            a, b = _halves(first)
            c, d = _halves(second)
            e, f = _halves(third)
            g, h = _halves(fourth)
            return a, b, c, d, e, f, g, h
        else:
            return tl.inline_asm_elementwise(
                _INTEGERS,
                "=h,=h,=h,=h,=h,=h,=h,=h,r",
                [word],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
    elif FLOATS:
        beside = beside.to(tl.int32)
        low = ((beside & 0xFF) << 20 | _SCALE_TOP << 16).to(tl.float32, bitcast=True)
        high = ((beside & 0xFF00) << 12 | _SCALE_TOP << 16).to(tl.float32, bitcast=True)
        return (
            _plain_float(word, low, 14, 7, 15),
            _plain_float(word, low, 30, 23, 31),
            _plain_float(word, low, 4, 5, 13),
            _plain_float(word, low, 20, 21, 29),
            _plain_float(word, high, 0, 1, 9),
            _plain_float(word, high, 16, 17, 25),
            _plain_float(word, high, 10, 11, 19),
            _plain_float(word, high, 26, 27, 3),
        )
    else:
        return (
            _plain_integer(word, 0),
            _plain_integer(word, 16),
            _plain_integer(word, 4),
            _plain_integer(word, 20),
            _plain_integer(word, 8),
            _plain_integer(word, 24),
            _plain_integer(word, 12),
            _plain_integer(word, 28),
        )


@triton.jit
def fragment_rows(OUTPUTS: tl.constexpr, WARPS: tl.constexpr, DEEP: tl.constexpr):
    """Return the row of a tile, and its block of WIDTH columns, that is loaded at each place.

    No weight then moves between threads: a thread loads whole words of every `8 WARPS`-th place, and the matrix units
    want rows eight apart from it. Warps have rows of their own, or with DEEP, columns of their own."""
    if DEEP:
        at = tl.arange(0, OUTPUTS * WARPS)
        return at // (8 * WARPS) * 8 + at % 8, at // 8 % WARPS
    else:
        at = tl.arange(0, OUTPUTS)
        row = at // (16 * WARPS) * (16 * WARPS) + at // 8 % WARPS * 16 + at // (8 * WARPS) % 2 * 8 + at % 8
        return row, 0 * at


@triton.jit
def fragments(
    word,
    beside,
    WARPS: tl.constexpr,
    DEEP: tl.constexpr,
    FLOATS: tl.constexpr,
    BITS: tl.constexpr,
    ACROSS: tl.constexpr = False,
):
    """Return the weights `[OUTPUTS, WIDTH]` of `word[OUTPUTS, WIDTH / 8]`, loaded in the order of `fragment_rows`.

    With DEEP they are `[WARPS, OUTPUTS, WIDTH]`. With ACROSS, columns are in the order of `across`, in which products
    of whole warp groups take them; otherwise rows and columns are in their natural order."""
    a, b, c, d, e, f, g, h = _codes(word, beside, FLOATS, BITS)
    near = tl.join(tl.join(a, b), tl.join(c, d))
    far = tl.join(tl.join(e, f), tl.join(g, h))
    # [.., row block, half, warp, row, lane, word, column, pair, step]
    parts = tl.reshape(tl.join(near, far), (word.shape[0] // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2))
    if DEEP:
        parts = tl.permute(parts, (2, 0, 1, 3, 5, 8, 4, 7, 6))
        whole = tl.reshape(parts, (WARPS, word.shape[0] // WARPS, WIDTH))
    elif ACROSS:
        whole = tl.reshape(tl.permute(parts, (0, 2, 1, 3, 5, 8, 7, 4, 6)), (word.shape[0], WIDTH))
    else:
        whole = tl.reshape(tl.permute(parts, (0, 2, 1, 3, 5, 8, 4, 7, 6)), (word.shape[0], WIDTH))
    if BITS:  # Triton 3.6 and 3.7 fail to compile a product of a tensor that was reshaped last
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [whole], dtype=tl.bfloat16, is_pure=True, pack=2)
    return whole


@triton.jit
def row_places(rows, num_fragments, SIZE: tl.constexpr):
    """Return where each row of weights starts: of its words, or of the scales of floats, SIZE for each fragment."""
    return rows // STRIP_ROWS * (num_fragments * (STRIP_ROWS * SIZE)) + rows % STRIP_ROWS * SIZE


@triton.jit
def across(columns):
    """Return the column at each place, in the order in which warp groups take columns from rows of x."""
    return columns // 16 * 16 + columns // 2 % 4 * 4 + columns // 8 % 2 * 2 + columns % 2


@triton.jit
def widen_fragments_kernel(
    words,
    scales,
    factors,
    out,
    num_rows,
    matrix_rows,
    width,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Write `OUTPUTS x FRAGMENT` elements of the widened matrix, each rounded once."""
    FLOATS: tl.constexpr = GROUP == GROUP_OF_FLOATS
    pieces = width // WIDTH
    first, piece = tl.program_id(0) // pieces * OUTPUTS, tl.program_id(0) % pieces
    at = tl.minimum(first + fragment_rows(OUTPUTS, WARPS, False)[0], num_rows - 1).to(tl.int64)
    rows = first + tl.arange(0, OUTPUTS)
    own = tl.minimum(rows, num_rows - 1)
    word = tl.arange(0, WORDS)
    code = tl.load(words + row_places(at, pieces, WORDS)[:, None] + (piece * (STRIP_ROWS * WORDS) + word)[None, :])
    factor = tl.load(factors + own)
    if FLOATS:
        beside = tl.load(
            scales + row_places(at, pieces, PAIRS)[:, None] + (piece * (STRIP_ROWS * PAIRS) + word % 4)[None, :]
        )
        value = fragments(code, beside, WARPS, False, True, BITS).to(tl.float32) * (factor * FLOAT_FACTOR)[:, None]
    else:
        above = own // matrix_rows * (width // GROUP)
        scale = tl.load(scales + ((above + piece * WIDTH // GROUP) * matrix_rows).to(tl.int64) + own % matrix_rows)
        value = fragments(code, code, WARPS, False, False, BITS).to(tl.float32) * scale.to(tl.float32)[:, None]
        value *= factor[:, None]
    columns = piece * WIDTH + tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * width + columns[None, :], value.to(out.dtype.element_ty), mask=inside)


def by_pairs(matrix: FragmentMatrix) -> bool:
    """Return whether kernels unpack two codes at a time, in assembler."""
    return traits_of(matrix.words.device).multiplies_fp8


def widen_fragments(matrix: FragmentMatrix) -> Tensor:
    """Return the widened matrix `[..., N, K]` in bfloat16, in the order of its codes."""
    num_rows, (matrix_rows, width) = matrix.shape[:-1].numel(), matrix.shape[-2:]
    out = torch.empty(matrix.shape, dtype=torch.bfloat16, device=matrix.words.device)
    sizes: dict[str, Any] = {"GROUP": matrix.group, "OUTPUTS": WIDEN_ROWS, "WARPS": 2, "num_warps": 2}
    counts = (num_rows, matrix_rows, width)
    programs = ceil_div(num_rows, WIDEN_ROWS) * (width // FRAGMENT)
    operands = (matrix.words, matrix.scales, matrix.factors, out)
    widen_fragments_kernel[(programs,)](*operands, *counts, **sizes, BITS=by_pairs(matrix))
    return out
