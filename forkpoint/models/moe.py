"""A sparse MLP: routed experts, and optionally a shared one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import ConfigError, ModelFolderError
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import WHOLE, Cut, share, whole
from forkpoint.models.fields import Fields
from forkpoint.models.joints import JoinedMatrix, join_rows
from forkpoint.models.layers import Projection, over_ranks, read_projection
from forkpoint.models.quantization import FP8, Form, common_form
from forkpoint.models.weights import WeightSource
from forkpoint.ops.linear.packed import PER_WORD
from forkpoint.ops.linear.scaled import BLOCK, Matrix, dense, take_columns, take_rows
from forkpoint.ops.parameters import GateLimits, RouteRule
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import Experts

ALIGNED = 8  # rows of the router's output are padded to a multiple of this, see `_aligned`
DUMMY_BIAS = (-0.1, 0.1)  # range of random correction biases


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(PartConfig):
    """One layer's routed experts, and optionally a shared one.

    `gated` experts compute `down(silu(gate(x)) * up(x))`, others `down(relu(up(x)) ** 2)`. `bias` is the weight name of
    the correction bias that is added to scores when experts are chosen. `shared_name` is the weight name of the shared
    expert.
    """

    num_experts: int
    intermediate_size: int
    rule: RouteRule
    shared_intermediate_size: int = 0
    gated: bool = True
    bias: str | None = None
    shared_name: str = "shared_expert"
    wide_router: bool = False  # compute scores in fp32; routers with sigmoid scores always do
    latent_size: int = 0  # size of the routed experts' inputs and outputs, between two projections; 0: the hidden size
    limits: GateLimits | None = None  # of the routed experts
    shared_limits: GateLimits | None = None  # of the shared expert
    name: str = "mlp"

    @classmethod
    def read(cls, fields: Fields) -> MoEConfig:
        """Read the field names of Qwen's families. Raises as Fields does."""
        fields.require("hidden_act", "silu")
        shared = fields.integer("shared_expert_intermediate_size")
        return cls.of(fields, RouteRule(top_k=0, shared="gated"), shared_intermediate_size=shared)

    @classmethod
    def read_grouped(cls, fields: Fields, **style: Any) -> MoEConfig:
        """Read DeepSeek-V3's field names: sigmoid scores with a correction bias choose experts in groups.

        `style` sets further attributes. Raises as Fields does.
        """
        rule = RouteRule(
            top_k=0,
            score="sigmoid",
            groups=fields.integer("n_group", 1),
            top_groups=fields.integer("topk_group", 1),
            eps=1e-20,
            scale=fields.real("routed_scaling_factor", 1.0),
        )
        return cls.of(fields, rule, bias="gate.e_score_correction_bias", shared_name="shared_experts", **style)

    @classmethod
    def of(cls, fields: Fields, rule: RouteRule, **style: Any) -> MoEConfig:
        """Read the fields that all families share. `rule` lacks the counts and whether weights are normalised.

        `style` sets further attributes. Raises as Fields does.
        """
        num_experts, top_k = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
        size, shared = fields.integer("moe_intermediate_size"), style.get("shared_intermediate_size", 0)
        if top_k > num_experts // rule.groups * rule.top_groups or num_experts % rule.groups:
            groups = f" in {rule.top_groups} of {rule.groups} groups" if rule.groups > 1 else ""
            raise ModelFolderError(f"{fields.where}: cannot choose {top_k} experts per token of {num_experts}{groups}")
        normalise = fields.flag("norm_topk_prob", True)
        rule = replace(rule, top_k=top_k, normalise=normalise, num_shared=-(-shared // size))
        return cls(num_experts=num_experts, intermediate_size=size, rule=rule, **style)

    def build(self, build: Build, name: str, layer: int) -> SparseMLP:
        return SparseMLP(build, name, self)

    def cut(self, ranks: Ranks) -> MoEConfig:
        """Split each expert by its inner features. Raises ConfigError if they cannot be divided evenly.

        Ranks that gather keep the whole inner size and split only the outputs. The first projection then stays one
        operation.
        """
        if ranks.gathers:
            return self
        sizes = (self.intermediate_size, self.shared_intermediate_size)
        inner, shared = (share(size, "features of an expert", ranks) if size else 0 for size in sizes)
        if self.rule.num_shared != -(-shared // inner):
            raise ConfigError(
                f"tensor_parallel_size={ranks.size} splits the shared expert unlike the others; give a smaller size"
            )
        return replace(self, intermediate_size=inner, shared_intermediate_size=shared)

    def num_weights(self, hidden_size: int) -> int:
        routed = self._num_matrices * self.rule.top_k * self.intermediate_size * (self.latent_size or hidden_size)
        shared = self._num_matrices * hidden_size * self.shared_intermediate_size
        return routed + shared + 2 * hidden_size * self.latent_size

    def routed_weights(self, hidden_size: int) -> int:
        """Return the number of weights of all routed experts together."""
        return self._num_matrices * (self.latent_size or hidden_size) * self.num_experts * self.intermediate_size

    @property
    def _num_matrices(self) -> int:
        return 2 + self.gated


class SparseMLP:
    """The layer `sum_j w_j expert_j(x)` over the experts that `rule` chooses for each token, plus the shared expert.

    The shared expert is split into experts of the routed ones' size, whose outputs add up to its own. One operation can
    then run all of a token's experts.
    """

    def __init__(self, build: Build, name: str, moe: MoEConfig) -> None:
        if moe.latent_size:
            build = replace(build, defers=False)
        self._ops, self._moe, ranks, hidden = build.ops, moe, build.ranks, build.config.hidden_size
        self._width = moe.latent_size or hidden  # of the routed experts' inputs and outputs
        self._all_ranks = over_ranks(build, self._width)
        self._router = self._read_router(build, name)
        self._num_scores = moe.num_experts + (moe.rule.shared == "gated")
        self._bias: Tensor | None = None
        if moe.bias is not None:
            self._bias = build.weights.get(f"{name}.{moe.bias}", (moe.num_experts,), torch.float32, DUMMY_BIAS)
        self._narrow: Callable[[Tensor], Tensor] = lambda x: x
        self._widen = self._narrow
        if moe.latent_size:
            self._narrow = read_projection(build, f"{name}.fc1_latent_proj", moe.latent_size, hidden)
            self._widen = read_projection(build, f"{name}.fc2_latent_proj", hidden, moe.latent_size)
        self._into = ("gate", "up") if moe.gated else ("up",)  # names of an expert's input matrices
        self._in_cut, self._out_cut = Cut(-2), Cut(-1)
        self._num_outputs = self._width  # of `down` on this rank
        if ranks.gathers:
            self._in_cut = self._out_cut = WHOLE
        if ranks.cuts_rows(self._width):
            self._out_cut, self._num_outputs = Cut(-2), self._width // ranks.size
        routed, shared = self._forms(build, name)
        # experts in two forms, or with two limits, need two operations
        joins = not moe.rule.num_shared or (routed == shared and moe.limits == moe.shared_limits)
        experts, prepare = build.ops.experts, build.ops.prepare_experts
        self._experts: Any = prepare(*self._read_experts(build, name, routed, joins))
        self._shared: Any = None if joins else prepare(*self._read_shared_apart(build, name, shared))
        self._apply_shared = limited(experts, moe.shared_limits)
        if joins and build.leaves_parts:
            experts = build.ops.experts_parts or experts
        self._apply = limited(experts, moe.limits)

    def _read_router(self, build: Build, name: str) -> Callable[[Tensor], Tensor]:
        """Read the operator of the experts' scores, which the shared expert's follows if it is gated."""
        source, moe, hidden = build.weights, self._moe, build.config.hidden_size
        rows = {f"{name}.gate": moe.num_experts}
        if moe.rule.shared == "gated":
            rows[f"{name}.{moe.shared_name}_gate"] = 1
        if moe.wide_router or moe.rule.score == "sigmoid":  # sigmoids of large scores are close together
            parts = [read_wide(source, f"{part}.weight", (count, hidden)) for part, count in rows.items()]
            return Projection(build.ops, torch.cat(parts)).wide
        joined = join_rows(source, {part: whole(count) for part, count in rows.items()}, hidden)
        if isinstance(joined, Tensor):
            joined = _aligned(joined)
        return Projection(build.ops, joined, linear=build.ops.linear_parts)

    def _read_experts(self, build: Build, name: str, form: Form | None, joins: bool) -> tuple[Matrix, Matrix]:
        """Read `gate_up[E, 2I, H]` (`[E, I, H]` without a gate) and `down[E, H, I]` of the routed experts.

        The shared expert's slices follow if it `joins` them. `form` is the routed experts'.
        """
        count, inner = self._moe.num_experts, self._moe.intermediate_size
        hidden, given = self._width, self._num_outputs
        source, total = build.weights, count + (self._moe.rule.num_shared if joins else 0)
        whole, size = inner % BLOCK == 0, len(self._into) * inner
        gate_up = JoinedMatrix(source, (total, size, hidden), form, whole)
        fused, apart = self._stacks(name)
        stack: Matrix | None = None
        if source.holds(fused):
            cut = replace(self._in_cut, sections=((inner, 1),) * len(self._into))
            gate_up.put(source.get_matrix(fused, (count, size, hidden), cut), 0, slice(count))
            # Read before `down` is allocated. Otherwise `down` would take the memory that the first stack freed, and
            # waste the rest of it.
            stack = source.get_matrix(apart, (count, given, inner), self._out_cut)
        slices = within(form, inner, self._moe.shared_intermediate_size if joins else 0)
        down = JoinedMatrix(source, (total, given, inner), slices, True)
        if stack is not None:
            down.put(stack, 0, slice(count))
        else:
            for e in range(count):
                expert = f"{name}.experts.{e}"
                for i, part in enumerate(self._into):
                    into = source.get_matrix(f"{expert}.{part}_proj.weight", (inner, hidden), self._in_cut)
                    gate_up.put(into, i * inner, e)
                down.put(source.get_matrix(f"{expert}.down_proj.weight", (given, inner), self._out_cut), 0, e)
        if total > count:
            self._read_shared(build, f"{name}.{self._moe.shared_name}", gate_up, down, count)
        return gate_up.matrix, down.matrix

    def _read_shared_apart(self, build: Build, name: str, form: Form | None) -> tuple[Matrix, Matrix]:
        """Read the slices of the shared expert, of this `form`, as experts of their own: gate_up and down."""
        inner, count, source = self._moe.intermediate_size, self._moe.rule.num_shared, build.weights
        into = (count, len(self._into) * inner, build.config.hidden_size)
        gate_up = JoinedMatrix(source, into, form, inner % BLOCK == 0)
        slices = within(form, inner, self._moe.shared_intermediate_size)
        down = JoinedMatrix(source, (count, self._num_outputs, inner), slices, True)
        self._read_shared(build, f"{name}.{self._moe.shared_name}", gate_up, down, 0)
        return gate_up.matrix, down.matrix

    def _stacks(self, name: str) -> tuple[str, str]:
        """Return the names of the two tensors that may store all experts in one matrix each."""
        return f"{name}.experts.{'_'.join(self._into)}_proj", f"{name}.experts.down_proj"

    def _forms(self, build: Build, name: str) -> tuple[Form | None, Form | None]:
        """Return the forms of the routed experts and of the shared one, which are equal if one form serves both."""
        source, moe, parts = build.weights, self._moe, (*self._into, "down")
        stacks = self._stacks(name)
        apart = [f"{name}.experts.{e}.{part}_proj.weight" for e in range(moe.num_experts) for part in parts]
        routed = common_form(map(source.form, stacks if source.holds(stacks[0]) else apart))
        if not moe.rule.num_shared:
            return routed, None
        shared = common_form(source.form(f"{name}.{moe.shared_name}.{part}_proj.weight") for part in parts)
        # slices of the shared expert must not cut its blocks
        cut = moe.intermediate_size % BLOCK and moe.rule.num_shared > 1 and moe.shared_intermediate_size > BLOCK
        if shared == FP8 and cut and source.format is not None and source.format.by_block:
            shared = None
        both = common_form((routed, shared))
        return (both, both) if both is not None else (routed, shared)

    def _read_shared(self, build: Build, name: str, gate_up: JoinedMatrix, down: JoinedMatrix, first: int) -> None:
        """Put slices of the shared expert in the places from `first` on. The last slice is padded with zeros."""
        moe, hidden, source = self._moe, build.config.hidden_size, build.weights
        inner, whole = moe.intermediate_size, moe.shared_intermediate_size
        into = [source.get_matrix(f"{name}.{part}_proj.weight", (whole, hidden), self._in_cut) for part in self._into]
        back = source.get_matrix(f"{name}.down_proj.weight", (down.matrix.shape[1], whole), self._out_cut)
        if isinstance(down.matrix, Tensor):
            back = dense(back)
        for part in range(moe.rule.num_shared):
            start, end = part * inner, min((part + 1) * inner, whole)
            rows, expert = torch.arange(start, end), first + part
            for i, matrix in enumerate(into):
                gate_up.put(take_rows(matrix, rows), i * inner, expert)
            down.put(take_columns(back, start, end), 0, expert)

    def __call__(self, x: Tensor, ctx: ForwardContext | None = None) -> Tensor:
        """Run the experts: `x[T, H] -> [T, H]`, or an Unsummed of it. Does not read the context."""
        weights, ids = self._ops.route(self._router(x)[:, : self._num_scores], self._moe.rule, self._bias)
        narrow = self._narrow(x)
        if self._shared is None:
            return self._widen(self._all_ranks(self._apply(narrow, self._experts, weights, ids)))
        top_k = self._moe.rule.top_k
        routed = self._apply(narrow, self._experts, weights[:, :top_k].contiguous(), ids[:, :top_k].contiguous())
        own = (weights[:, top_k:].contiguous(), (ids[:, top_k:] - self._moe.num_experts).contiguous())
        return self._widen(self._all_ranks(routed + self._apply_shared(narrow, self._shared, *own)))


def limited(experts: Experts, limits: GateLimits | None) -> Experts:
    """Return the operator with limits."""
    return experts if limits is None else partial(experts, limits=limits)


def within(form: Form | None, *widths: int) -> Form | None:
    """Return the form of a matrix of slices that are cut at multiples of `widths`; None if words would be cut."""
    if form is None or form.kind == "fp8":
        return form
    group = gcd(form.group, *widths)
    return None if group % PER_WORD else replace(form, group=group)


def _aligned(weight: Tensor) -> Tensor:
    """Return the rows and some of zeros: vendors' libraries are slow if rows of the output are not aligned."""
    return F.pad(weight, (0, 0, 0, -len(weight) % ALIGNED))


def read_wide(source: WeightSource, name: str, shape: tuple[int, int]) -> Tensor:
    """Read a matrix in fp32. Quantised ones are widened."""
    if source.form(name) is not None:
        return dense(source.get_matrix(name, shape)).float()
    return source.get(name, shape, torch.float32)
