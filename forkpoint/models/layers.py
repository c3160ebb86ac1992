"""The small parts that all families share: projections, norms and the dense MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forkpoint.models.config import Block, Build, PartConfig
from forkpoint.models.cuts import ROWS, WHOLE, Cut, rows, share
from forkpoint.models.fields import Fields
from forkpoint.models.weights import join_rows
from forkpoint.ops.activation.reference import relu_squared
from forkpoint.ops.linear.scaled import Matrix, dense, multiplied, take_rows
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import Linear, OpTable
from forkpoint.ops.unmade import Unmade


class Projection:
    """A linear layer, packed once; by `linear` if it is not the table's."""

    def __init__(self, ops: OpTable, weight: Matrix, bias: Tensor | None = None, linear: Linear | None = None) -> None:
        self._linear, self._wide = linear or ops.linear, ops.wide_linear
        self.packed: Any = ops.prepare_linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`x[T, K] -> [T, N]`."""
        return self._linear(x, self.packed)

    def wide(self, x: Tensor) -> Tensor:
        """`x[T, K] -> [T, N]` in fp32, as the weights are."""
        if self._wide is None or x.dtype != torch.bfloat16:
            return self(x.float())
        return self._wide(x, self.packed)


def read_projection(
    build: Build,
    name: str,
    rows: int,
    columns: int,
    bias: bool = False,
    scale: float = 1.0,
    linear: Linear | None = None,
    cut: Cut = WHOLE,
) -> Projection:
    """The layer `name.weight` `[rows, columns]`, with `name.bias` if `bias`, its answers multiplied by `scale`."""
    weight = build.weights.get_matrix(f"{name}.weight", (rows, columns), cut)
    shift = build.weights.get(f"{name}.bias", (rows,), cut=cut) if bias else None
    if scale != 1.0:
        weight, shift = multiplied(weight, scale), None if shift is None else shift * scale
    return Projection(build.ops, weight, shift, linear)


def join_projections(
    build: Build,
    name: str,
    rows: Mapping[str, Cut],
    columns: int,
    bias: bool = False,
    scale: Tensor | None = None,
    order: Tensor | None = None,
) -> Projection:
    """The layers `name.PART_proj` `[rows[PART], columns]` in one: behind each other, rows times `scale[N]` fp32, and
    then in another order."""
    named = {f"{name}.{part}_proj": cut for part, cut in rows.items()}
    weight, shift = join_rows(build.weights, named, columns), None
    if bias:
        shift = torch.cat([build.weights.get(f"{each}.bias", (cut.length,), cut=cut) for each, cut in named.items()])
    if scale is not None:
        weight, shift = multiplied(weight, scale[:, None]), None if shift is None else dense(multiplied(shift, scale))
    if order is not None:
        weight, shift = take_rows(weight, order), None if shift is None else shift[order]
    return Projection(build.ops, weight, shift)


def over_ranks(build: Build, rows: int) -> Callable[[Tensor], Tensor]:
    """What makes the answer `[T, rows]` of what each rank has of it: of a sum, which may be left to the norm behind it,
    or, where ranks gather, of so many outputs."""
    ranks = build.ranks
    if not ranks.gathers:
        return Unsummed.of if build.defers and ranks.defers else ranks.sum
    return ranks.gather if ranks.cuts_rows(rows) else lambda own: own


class Unsummed(Unmade):
    """What one rank has of a sum over ranks, which may be `Parts`."""


class RowParallel:
    """A linear layer whose input is cut over ranks, and whose output all of them have."""

    def __init__(
        self, build: Build, name: str, rows: int, columns: int, bias: bool = False, scale: float = 1.0
    ) -> None:
        """`name.weight` `[rows, columns of this rank]`, as of `read_projection`."""
        self._ranks, self._over_ranks, adds_bias = build.ranks, over_ranks(build, rows), bias
        cut = Cut(-1)
        if build.ranks.gathers:
            columns *= build.ranks.size
            cut = ROWS if build.ranks.cuts_rows(rows) else WHOLE
            rows //= build.ranks.size if cut is ROWS else 1
        elif build.ranks.rank:
            build.weights.get(f"{name}.bias", (rows,)) if bias else None
            adds_bias = False  # once in the sum
        linear = build.ops.linear_parts if build.leaves_parts else None
        self._own = read_projection(build, name, rows, columns, adds_bias, scale, linear, cut)

    def __call__(self, x: Tensor) -> Tensor:
        """`x[T, K of this rank] -> [T, N]`."""
        return self._over_ranks(self._own(self._ranks.gather(x) if self._ranks.gathers else x))


class RMSNorm:
    """A norm whose weight is held in fp32; `centred` weights are stored as their distance from 1."""

    def __init__(
        self, build: Build, name: str, size: int, centred: bool, eps: float | None = None, cut: Cut = WHOLE
    ) -> None:
        span = (-0.1, 0.1) if centred else (0.9, 1.1)
        weight = build.weights.get(f"{name}.weight", (size,), torch.float32, span, cut)
        self.weight = weight + 1.0 if centred else weight
        self.eps = build.config.rms_norm_eps if eps is None else eps
        self._ops, self._ranks = build.ops, build.ranks

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dim."""
        return self._ops.rmsnorm(x, self.weight, self.eps)

    def across(self, x: Tensor, ranks: Ranks) -> Tensor:
        """Over the last dims of all ranks side by side, of which each has its own."""
        if ranks.size == 1:
            return self(x)
        own = x.shape[-1]
        return self(ranks.gather(x)).narrow(-1, ranks.rank * own, own)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of `residual + x`, `residual + x`); without a residual, x starts it."""
        if residual is None:
            return self(x), x
        if isinstance(x, Unsummed):
            if self._ranks.norms_sums(residual.shape[1], residual.dtype):
                rounded = self._ops.rounds
                return self._ranks.sum_add_rmsnorm(x.own, residual, self.weight, self.eps, rounded), residual
            x = self._ranks.sum(x.own)
        return self._ops.add_rmsnorm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class MLPConfig(PartConfig):
    """One layer's dense MLP: `down(silu(gate(x)) * up(x))`, or without a gate `down(relu(up(x)) ** 2)`.

    `fused` ones are stored with gate and up in one matrix. The scales multiply gate(x) and down(..).
    """

    intermediate_size: int
    gated: bool = True
    name: str = "mlp"
    fused: bool = False
    gate_scale: float = 1.0
    down_scale: float = 1.0

    @classmethod
    def read(cls, fields: Fields) -> MLPConfig:
        """Under the names of most config.json."""
        fields.require("hidden_act", "silu")
        return cls(fields.integer("intermediate_size"))

    def build(self, build: Build, name: str, layer: int) -> Block:
        """`x[T, H] -> [T, H]`, whatever the context; gate and up in one product."""
        hidden, size, ops = build.config.hidden_size, self.intermediate_size, build.ops
        down = RowParallel(build, f"{name}.down_proj", hidden, size, scale=self.down_scale)
        if not self.gated:
            only = read_projection(build, f"{name}.up_proj", size, hidden, cut=ROWS)
            return lambda x, ctx: down(relu_squared(only(x)))
        parts = {"gate_up": rows(size, size)} if self.fused else {"gate": rows(size), "up": rows(size)}
        scale = None if self.gate_scale == 1.0 else torch.tensor([self.gate_scale, 1.0]).repeat_interleave(size)
        gate_up = join_projections(build, name, parts, hidden, scale=scale).packed
        return lambda x, ctx: down(ops.linear_silu_mul(x, gate_up))

    def cut(self, ranks: Ranks) -> MLPConfig:
        return replace(self, intermediate_size=share(self.intermediate_size, "features of an MLP", ranks))

    def num_weights(self, hidden_size: int) -> int:
        return (3 if self.gated else 2) * hidden_size * self.intermediate_size
