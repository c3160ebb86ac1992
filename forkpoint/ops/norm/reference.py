"""Root-mean-square norms, and a softmax over them, in torch: fp32 arithmetic, one rounding at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.activation import reference as activation


def _normalised(x: Tensor, eps: float) -> Tensor:
    """Return fp32 `x / sqrt(mean(x^2) + eps)` over the last dim."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dim of `x[..., D]` with `weight[D]` fp32; return x's dtype."""
    return (_normalised(x, eps) * weight).to(x.dtype)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the last dim of `x[..., D]` to mean 0 and variance 1, with `weight[D]` and `bias[D]` fp32."""
    wide = x.float()
    return (_normalised(wide - wide.mean(-1, keepdim=True), eps) * weight + bias).to(x.dtype)


def add_layer_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (layer norm of `x + added`, `x + added`), all `[T, D]`."""
    total = x + added
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm of `residual + x`, `residual + x`). Neither argument is written."""
    total = residual + x
    return rmsnorm(total, weight, eps), total


def gated_rmsnorm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool = False, sigmoid: bool = False
) -> Tensor:
    """Return `rmsnorm(x) * weight * silu(gate)` over the last dim of `[T, HV, V]`, in x's dtype.

    `table.GatedRMSNorm` says what `gate_first` and `sigmoid` change.
    """
    wide = gate.float()
    factor = activation.sigmoid(wide) if sigmoid else activation.silu(wide)
    if gate_first:
        return (_normalised(x.float() * factor, eps) * weight).to(x.dtype)
    return (_normalised(x, eps) * weight * factor).to(x.dtype)


def mix_residuals(done: Tensor, current: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Implement `table.MixResiduals`.

    Each row's scores lie together, as torch's softmax over another dim than the last computes the tail of a vector loop
    with another exponential than its body.
    """
    wide = done.float()
    if current is not None:
        wide = torch.cat((wide, current[None].float()))
    shares = (_normalised(wide, eps) * weight).sum(-1).T.softmax(-1).T
    return (shares.unsqueeze(-1) * wide).sum(0).to(done.dtype)
