"""Elementwise gates in Triton; see reference.py for what they compute."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap

BLOCK = 1024


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
def _silu_mul_kernel(x, out, stride, size, pieces, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_inputs(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // pieces).to(tl.int64)
    at = (pid % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (value * silu(gate)).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(x[:, :I]) * x[:, I:]` for `x[T, 2I]`, in x's dtype."""
    assert gate_up.stride(1) == 1, "elements of a row lie side by side"
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        pieces = triton.cdiv(size, BLOCK)
        grid, options = (rows * pieces,), overlap(out.device, rows)
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, pieces, BLOCK=BLOCK, **options)
    return out
