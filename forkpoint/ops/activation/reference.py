"""Elementwise gates in torch.

torch's own sigmoid, silu and softplus compute the tail of a vector loop with another exponential than its
body, so an element's bits depend on where it lies in the batch. `torch.exp` and `torch.log1p` do not;
everything here is built on them, in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.parameters import GateLimits

SOFTPLUS_LINEAR_ABOVE = 20.0


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))` of an fp32 tensor."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))` of an fp32 tensor."""
    return x / torch.exp(-x).add_(1.0)


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))` of an fp32 tensor, x itself above SOFTPLUS_LINEAR_ABOVE."""
    soft = torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR_ABOVE)))
    return torch.where(x > SOFTPLUS_LINEAR_ABOVE, x, soft)


def silu_mul(gate_up: Tensor, limits: GateLimits | None = None) -> Tensor:
    """Return `silu(x[:, :I]) * x[:, I:]` for `x[T, 2I]`, in x's dtype. `limits` clamp both halves before that."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limits is not None:
        gate, up = gate.clamp(max=limits.gate), up.clamp(-limits.up, limits.up)
    return (silu(gate.float()) * up.float()).to(gate_up.dtype)


def relu_squared(x: Tensor) -> Tensor:
    """`relu(x) ** 2`, in x's dtype."""
    return F.relu(x).square()


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`; `gate` has x's shape, or broadcasts to it."""
    return (x.float() * sigmoid(gate.float())).to(x.dtype)
