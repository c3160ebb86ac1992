"""Elementwise gates in Triton. reference.py has the formulas."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.linear.fp8_kernel import Rounded, store_narrowed, written_beside
from forkpoint.ops.linear.scaled import BLOCK as SCALE_BLOCK
from forkpoint.ops.parameters import GateLimits
from forkpoint.ops.rounding import ceil_div

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
    gate_limit,
    up_limit,
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
    if gate_limit is not None:
        gate, value = tl.minimum(gate, gate_limit), tl.minimum(tl.maximum(value, -up_limit), up_limit)
    value = (value * silu(gate)).to(out.dtype.element_ty)
    tl.store(out + row * size + at, value, mask=inside)
    if codes is not None:
        part = tl.arange(0, BLOCK // PIECE)
        piece = pid % pieces * (BLOCK // PIECE) + part
        value = tl.reshape(value.to(tl.float32), (BLOCK // PIECE, PIECE))
        store_narrowed(value, codes, scales, row + 0 * part, piece, piece * PIECE < size, size, padded_rows)


def silu_mul(gate_up: Tensor, rounded: bool = False, limits: GateLimits | None = None) -> Tensor:
    """Return `silu(x[:, :I]) * x[:, I:]` for `x[T, 2I]`, in x's dtype; with `rounded` it also carries its FP8 form.

    `limits` clamp both halves before that."""
    assert gate_up.stride(1) == 1, "elements of a row lie side by side"
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = Rounded.room(rows, size, like=gate_up, rounded=rounded)
    if rows:
        pieces = ceil_div(size, BLOCK.value)
        shape = (gate_up.stride(0), size, pieces)
        codes, scales, padded_rows = written_beside(out)
        operands = (gate_up, out, codes, scales, *(limits or (None, None)), padded_rows)
        _silu_mul_kernel[(rows * pieces,)](*operands, *shape, **overlap(out.device, rows))
    return out
