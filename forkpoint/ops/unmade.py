"""Matrices whose final sum is left to the operator that reads them, which saves a launch."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor


class Unmade(Tensor):
    """A matrix `[M, N]` that is still to be computed from `own`. Every torch operation on it raises AssertionError."""

    own: Tensor

    @classmethod
    def of(cls, own: Tensor) -> Self:
        plain = own.own if isinstance(own, Unmade) else own  # `own` itself stays what it is
        found = plain.as_subclass(cls)
        found.own = own
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a sum was left to a norm, and something else came first")


class Parts(Unmade):
    """The sum over P of `own[M, P, N]` in order, rounded once to the model's dtype.

    If there are `shares[M, P]` fp32, each part is multiplied by its share."""

    shares: Tensor | None = None

    @classmethod
    def of(cls, own: Tensor, shares: Tensor | None = None) -> Self:
        found = super().of(own)
        found.shares = shares
        return found

    def __getitem__(self, columns: Any) -> Parts:
        """Return `[:, columns]`, still as `Parts`."""
        return Parts.of(self.own[:, :, columns[1]], self.shares)
