"""Sums whose terms are added one after another, so that a token's bits do not depend on the batch."""

from __future__ import annotations

from torch import Tensor


def weighted(x: Tensor, weights: Tensor) -> Tensor:
    """Return `sum_n weights[t, n] * x[t, n]` in fp32, for `x[T, N, H]` and `weights[T, N, ...]` fp32."""
    total = weights[:, 0] * x[:, 0].float()
    for n in range(1, x.shape[1]):
        total = total + weights[:, n] * x[:, n].float()
    return total


def summed(x: Tensor, dim: int) -> Tensor:
    """Return the sum over a dim, which stays as one of size 1."""
    first, *others = x.unbind(dim)
    total = first.clone()
    for other in others:
        total += other
    return total.unsqueeze(dim)


def mean(x: Tensor) -> Tensor:
    """Return the mean `[T, H]` of `x[T, N, H]`, computed in fp32."""
    return (summed(x.float(), 1).squeeze(1) / x.shape[1]).to(x.dtype)
