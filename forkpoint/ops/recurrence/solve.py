"""What the chunk kernels of delta rules share: where a chunk lies, and the inverse of its system."""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.metadata import TILE

CHUNK = tl.constexpr(TILE)
SUB = tl.constexpr(16)  # rows of the diagonal blocks that are inverted one row at a time
BLOCKS = tl.constexpr(TILE // 16)


@triton.jit
def unit_lower_inverse(system, HALF: tl.constexpr):
    """`(I + A)^-1` of a strictly lower triangular fp32 `[C, C]`.

    The 16-row diagonal blocks by forward substitution, all together, column by column. Then with D their inverses and
    L the blocks below them, `N = D L` has `N^4 = 0`, so that `(I + A)^-1 = (I - N)(I + N^2) D`. HALF takes float16
    operands for these products: as exact as tf32, and every entry is a product of contractions, so none is large.
    """
    block, row, at = tl.arange(0, BLOCKS), tl.arange(0, SUB), tl.arange(0, CHUNK)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(system, (BLOCKS, SUB, BLOCKS, SUB)), 0.0), axis=2)
    inverse = tl.zeros((BLOCKS, SUB, SUB), tl.float32) + (row[:, None] == row[None, :]).to(tl.float32)[None, :, :]
    for j in range(SUB - 1):
        # Row j of the inverse is final; the rows below it take their share of it.
        column = tl.sum(tl.where((row == j)[None, None, :], diagonal, 0.0), axis=2)
        final = tl.sum(tl.where((row == j)[None, :, None], inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * final[:, None, :]
    kind: tl.constexpr = tl.float16 if HALF else tl.float32
    wide = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (CHUNK, CHUNK)).to(kind)
    below = tl.where((at // SUB)[:, None] > (at // SUB)[None, :], system, 0.0).to(kind)
    unit = (at[:, None] == at[None, :]).to(tl.float32)
    first = tl.dot(wide, below, input_precision="ieee")
    step = first.to(kind)
    square = tl.dot(step, step, input_precision="ieee")
    series = unit - first + square
    series -= tl.dot(step, square.to(kind), input_precision="ieee")
    return tl.dot(series.to(kind), wide, input_precision="ieee")


@triton.jit
def first_chunk(cu_seqlens, segment):
    """Of a segment's first chunk in the scratch buffers, which have room for T // 64 + N chunks."""
    return tl.load(cu_seqlens + segment) // CHUNK + segment


@triton.jit
def chunk_place(cu_seqlens, segment, offset, head, HEADS: tl.constexpr):
    """Of the chunk `offset` tokens into a segment: (its first token, tokens from there to the segment's end, its entry
    in the scratch buffers)."""
    start = tl.load(cu_seqlens + segment) + offset
    count = tl.load(cu_seqlens + segment + 1) - start
    entry = (first_chunk(cu_seqlens, segment) + offset // CHUNK).to(tl.int64) * HEADS + head
    return start, count, entry
