"""Elementwise gates in Triton; see reference.py for what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _gate_kernel(
    x, gate, out, x_stride, gate_stride, out_stride, size, pieces, SILU: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(0)
    row = (pid // pieces).to(tl.int64)
    at = (pid % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    switch = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    result = value * (silu(switch) if SILU else sigmoid(switch))
    tl.store(out + row * out_stride + at, result.to(out.dtype.element_ty), mask=inside)


def _gate(x: Tensor, gate: Tensor, is_silu: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = x.shape
    if rows:
        pieces = triton.cdiv(size, BLOCK)
        strides = (x.stride(0), gate.stride(0), out.stride(0))
        _gate_kernel[(rows * pieces,)](x, gate, out, *strides, size, pieces, SILU=is_silu, BLOCK=BLOCK)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(x[:, :I]) * x[:, I:]` for `x[T, 2I]`, in x's dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _gate(up, gate, True)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)` for `[T, N]`, in x's dtype."""
    return _gate(x, gate, False)
