"""Small layers that all families share: projections, norms and the dense MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forkpoint.models.config import Block, Build, ParallelConfig, PartConfig
from forkpoint.models.cuts import ROWS, WHOLE, Cut, rows, share
from forkpoint.models.fields import Fields
from forkpoint.models.joints import join_rows
from forkpoint.ops.activation.reference import relu_squared, silu_mul
from forkpoint.ops.linear.scaled import Matrix, dense, multiplied, take_rows
from forkpoint.ops.parameters import GateLimits
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import Linear, OpTable
from forkpoint.ops.unmade import Unmade


class Projection:
    """A linear layer whose weight is packed once. `linear` replaces the table's operator of that name."""

    def __init__(self, ops: OpTable, weight: Matrix, bias: Tensor | None = None, linear: Linear | None = None) -> None:
        self._linear, self._wide = linear or ops.linear, ops.wide_linear
        self.packed: Any = ops.prepare_linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: `x[T, K] -> [T, N]`."""
        return self._linear(x, self.packed)

    def wide(self, x: Tensor) -> Tensor:
        """Multiply in fp32, for weights in fp32: `x[T, K] -> [T, N]` fp32."""
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
    """Read the layer `name.weight` `[rows, columns]`, with `name.bias` if `bias`, both times `scale`.

    `rows` and `columns` are this rank's, see `Cut`. `linear` replaces the table's operator.
    """
    weight = build.weights.get_matrix(f"{name}.weight", (rows, columns), cut)
    shift = build.weights.bias(name, rows, bias, cut)
    if scale != 1.0:
        weight = multiplied(weight, scale)
        if shift is not None:
            shift = shift * scale
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
    """Join the layers `name.PART_proj` `[rows[PART], columns]` (and biases, if `bias`) into one.

    Their rows follow each other, are multiplied by `scale[N]` fp32, and then put into `order` (both None: left alone).
    """
    named = {f"{name}.{part}_proj": cut for part, cut in rows.items()}
    weight, shift = join_rows(build.weights, named, columns), None
    if bias:
        shift = torch.cat([build.weights.get(f"{each}.bias", (cut.length,), cut=cut) for each, cut in named.items()])
    if scale is not None:
        weight = multiplied(weight, scale[:, None])
        if shift is not None:
            shift = dense(multiplied(shift, scale))
    if order is not None:
        weight = take_rows(weight, order)
        if shift is not None:
            shift = shift[order]
    return Projection(build.ops, weight, shift)


def over_ranks(build: Build, rows: int) -> Callable[[Tensor], Tensor]:
    """Return the function that combines the ranks' outputs into the output `[T, rows]`.

    It sums, or leaves the sum to the next norm (Unsummed), or gathers outputs that the ranks compute separately.
    """
    ranks = build.ranks
    if build.defers and ranks.defers:
        return Unsummed.of
    if not ranks.gathers:
        return ranks.sum
    if ranks.cuts_rows(rows):
        return ranks.gather
    return lambda own: own


class Unsummed(Unmade):
    """One rank's share of a sum over ranks that the next norm computes. It may be an `unmade.Parts`."""


class RowParallel:
    """A linear layer whose input is split over ranks, and whose whole output every rank gets."""

    def __init__(
        self, build: Build, name: str, rows: int, columns: int, bias: bool = False, scale: float = 1.0
    ) -> None:
        """Read `name.weight` `[rows, columns of this rank]`, as `read_projection` does."""
        self._ranks, self._over_ranks, adds_bias = build.ranks, over_ranks(build, rows), bias
        cut = Cut(-1)
        if build.ranks.gathers:
            columns *= build.ranks.size
            cut = WHOLE
            if build.ranks.cuts_rows(rows):
                cut, rows = ROWS, rows // build.ranks.size
        elif build.ranks.rank:
            build.weights.bias(name, rows, bias)
            adds_bias = False  # the bias is added once, by rank 0
        linear = build.ops.linear_parts if build.leaves_parts else None
        self._own = read_projection(build, name, rows, columns, adds_bias, scale, linear, cut)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: `x[T, K of this rank] -> [T, N]`, or an Unsummed of it. Ranks must call it together."""
        if self._ranks.gathers:
            x = self._ranks.gather(x)
        return self._over_ranks(self._own(x))


class RMSNorm:
    """An RMS norm with its weight in fp32. `centred` weights are stored minus 1."""

    def __init__(
        self, build: Build, name: str, size: int, centred: bool, eps: float | None = None, cut: Cut = WHOLE
    ) -> None:
        span = (-0.1, 0.1) if centred else (0.9, 1.1)
        self.weight = build.weights.get(f"{name}.weight", (size,), torch.float32, span, cut)
        if centred:
            self.weight += 1.0
        self.eps = eps or build.config.rms_norm_eps
        self._ops, self._ranks = build.ops, build.ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rmsnorm(x, self.weight, self.eps)

    def across(self, x: Tensor, ranks: Ranks) -> Tensor:
        """Normalise over the last dims of all ranks together, where each rank holds its own part and gets it back."""
        if ranks.size == 1:
            return self(x)
        own = x.shape[-1]
        return self(ranks.gather(x)).narrow(-1, ranks.rank * own, own)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm of `residual + x`, `residual + x`), perhaps added in place. Without residual x is the residual.

        x may be an Unsummed, which is then summed over the ranks.
        """
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

    `fused`: gate and up are stored in one matrix. The scales multiply gate(x) and the MLP's output. `limits` clamp
    gate(x) and up(x).
    """

    intermediate_size: int
    gated: bool = True
    name: str = "mlp"
    fused: bool = False
    gate_scale: float = 1.0
    down_scale: float = 1.0
    limits: GateLimits | None = None

    @classmethod
    def read(cls, fields: Fields, limits: GateLimits | None = None) -> MLPConfig:
        """Read the field names that most config.json use. Raises as Fields does."""
        fields.require("hidden_act", "silu")
        return cls(fields.integer("intermediate_size"), limits=limits)

    def build(self, build: Build, name: str, layer: int) -> Block:
        """Build the MLP `x[T, H] -> [T, H]`, with gate and up in one product. It does not read the context."""
        hidden, size, ops = build.config.hidden_size, self.intermediate_size, build.ops
        down = RowParallel(build, f"{name}.down_proj", hidden, size, scale=self.down_scale)
        if not self.gated:
            only = read_projection(build, f"{name}.up_proj", size, hidden, cut=ROWS)
            return lambda x, ctx: down(relu_squared(only(x)))
        parts = {"gate_up": rows(size, size)} if self.fused else {"gate": rows(size), "up": rows(size)}
        scale = None if self.gate_scale == 1.0 else torch.tensor([self.gate_scale, 1.0]).repeat_interleave(size)
        joined, limits = join_projections(build, name, parts, hidden, scale=scale), self.limits
        if limits is not None:
            return lambda x, ctx: down(silu_mul(joined(x), limits))
        gate_up = joined.packed
        return lambda x, ctx: down(ops.linear_silu_mul(x, gate_up))

    def cut(self, ranks: Ranks) -> MLPConfig:
        return replace(self, intermediate_size=share(self.intermediate_size, "features of an MLP", ranks))

    def num_weights(self, hidden_size: int) -> int:
        return (2 + self.gated) * hidden_size * self.intermediate_size


@dataclass(frozen=True, slots=True)
class PostNormConfig(ParallelConfig):
    """Parts whose sum is normalised before it is added to the residual. `norm` is the norm's name in the layer."""

    norm: str = field(kw_only=True)

    def build(self, build: Build, name: str, layer: int) -> Block:
        block = ParallelConfig.build(self, build, name, layer)
        norm = RMSNorm(build, f"{name.removesuffix('.')}.{self.norm}", build.config.hidden_size, centred=False)
        return lambda x, ctx: norm(block(x, ctx))
