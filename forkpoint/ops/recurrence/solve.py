"""The inverse of a chunk's triangular system, and the places of chunks in scratch buffers, for delta-rule kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.metadata import TILE

CHUNK = tl.constexpr(TILE)
SUB = tl.constexpr(16)  # rows of a diagonal block, which is inverted row by row
BLOCKS = tl.constexpr(TILE // 16)


@triton.jit
def unit_lower_inverse(system, HALF: tl.constexpr):
    """Return `(I + A)^-1` of a strictly lower triangular fp32 `[C, C]`.

    The 16-row diagonal blocks are inverted together by forward substitution, column by column. With D their inverses
    and L the blocks below them, `N = D L` satisfies `N^4 = 0`, so `(I + A)^-1 = (I - N)(I + N^2) D`. HALF uses float16
    operands for these products. They are as exact as TF32, and no entry is large, because each is a product of
    contractions.
    """
    block, row, at = tl.arange(0, BLOCKS), tl.arange(0, SUB), tl.arange(0, CHUNK)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(system, (BLOCKS, SUB, BLOCKS, SUB)), 0.0), axis=2)
    inverse = tl.zeros((BLOCKS, SUB, SUB), tl.float32) + (row[:, None] == row[None, :]).to(tl.float32)[None, :, :]
    for j in range(SUB - 1):
        # Row j of the inverse is final. Subtract its share from the rows below it.
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
    """Return the entry of a segment's first chunk in the scratch buffers, which hold T // 64 + N chunks."""
    return tl.load(cu_seqlens + segment) // CHUNK + segment


@triton.jit
def chunk_place(cu_seqlens, segment, offset, head, HEADS: tl.constexpr):
    """Return, for the chunk `offset` tokens into a segment: (first token, tokens to the segment's end, scratch
    entry)."""
    start = tl.load(cu_seqlens + segment) + offset
    count = tl.load(cu_seqlens + segment + 1) - start
    entry = (first_chunk(cu_seqlens, segment) + offset // CHUNK).to(tl.int64) * HEADS + head
    return start, count, entry
