"""Elementwise gates in Triton. reference.py has the formulas."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.linear.fp8_kernel import Rounded, store_narrowed, written_beside
from forkpoint.ops.linear.scaled import BLOCK as SCALE_BLOCK

BLOCK = tl.constexpr(1024)  # elements per program
PIECE = tl.constexpr(SCALE_BLOCK)


@triton.jit
def silu(x):
    """`x / (1 + exp(-x))` of an fp32 block."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    """`1 / (1 + exp(-x))` of an fp32 block."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """`log(1 + exp(x))` of an fp32 block, x itself above 20."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _silu_mul_kernel(
    x,
    out,
    codes,
    scales,
    padded_rows,
    stride,
    size,
    pieces,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // pieces).to(tl.int64)
    at = (pid % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    value = (value * silu(gate)).to(out.dtype.element_ty)
    tl.store(out + row * size + at, value, mask=inside)
    if codes is not None:
        part = tl.arange(0, BLOCK // PIECE)
        piece = pid % pieces * (BLOCK // PIECE) + part
        value = tl.reshape(value.to(tl.float32), (BLOCK // PIECE, PIECE))
        store_narrowed(value, codes, scales, row + 0 * part, piece, piece * PIECE < size, size, padded_rows)


def silu_mul(gate_up: Tensor, rounded: bool = False) -> Tensor:
    """Return `silu(x[:, :I]) * x[:, I:]` for `x[T, 2I]`, in x's dtype; with `rounded` it also carries its FP8 form."""
    assert gate_up.stride(1) == 1, "elements of a row lie side by side"
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = Rounded.room(rows, size, like=gate_up, rounded=rounded)
    if rows:
        pieces = triton.cdiv(size, BLOCK.value)
        shape = (gate_up.stride(0), size, pieces)
        _silu_mul_kernel[(rows * pieces,)](gate_up, out, *written_beside(out), *shape, **overlap(out.device, rows))
    return out
