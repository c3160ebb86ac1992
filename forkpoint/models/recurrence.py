"""The parts that recurrent layers share: projection, short convolution, recurrence, gated norm, projection."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import (
    DELTA_RULE_OPERATIONS,
    STATE_SPACE_OPERATIONS,
    LayerSpec,
    Recording,
    StateSpec,
    TensorSpec,
)
from forkpoint.errors import ModelFolderError
from forkpoint.models.config import Block, Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import CONV, Convolution, kept_window
from forkpoint.models.cuts import ROWS, WHOLE, Cut, rows, share
from forkpoint.models.layers import RMSNorm, RowParallel
from forkpoint.models.states import LayerState
from forkpoint.ops.parameters import Recurrence, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import OpTable

# Ranges of random weights. They give slow decays, so that states matter in tests with random weights.
DUMMY_A_LOG = (-4.0, -1.0)
DUMMY_DT_BIAS = (-3.0, -1.0)
DUMMY_D = (0.5, 1.5)
MATRIX = "matrix"  # name of the state

# Maps `x[T, H]` to `mixed`, `a` and `b` of the recurrence, and the gate `[T, HV * V]`.
Project: TypeAlias = Callable[[Tensor, ForwardContext], tuple[Tensor, Tensor, Tensor | None, Tensor]]


class ConvRecurrence:
    """The recurrence over a layer's state `matrix`, after a convolution if there is one."""

    def __init__(self, ops: OpTable, matrix: LayerState, conv: Convolution | None, params: RecurrenceParams) -> None:
        self._ops, self._matrix, self._conv, self._params = ops, matrix, conv, params

    def __call__(self, mixed: Tensor, a: Tensor, b: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Compute `[T, HV, V]` from `mixed[T, mixed_dim]` and `a`, `b` `[T, HV]`.

        Reads and writes the slots that `ctx` names.
        """
        inputs, split, spec = RecurrenceInputs(mixed, a, b), ctx.num_decodes, self._params.spec
        if split == 0:
            return self._prefill(inputs, ctx, None)
        if split == mixed.shape[0]:
            return self._decode(inputs, ctx, None)
        shape = (mixed.shape[0], spec.num_v_heads, spec.value_dim)
        out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
        decodes, prefills = (
            RecurrenceInputs(mixed[part], a[part], None if b is None else b[part])
            for part in (slice(split), slice(split, None))
        )
        self._ops.side_by_side(
            mixed.device,
            lambda: self._decode(decodes, ctx, out[:split]),
            lambda: self._prefill(prefills, ctx, out[split:]),
        )
        return out

    def _decode(self, raw: RecurrenceInputs, ctx: ForwardContext, out: Tensor | None) -> Tensor:
        operator, args = self._matrix.decode(ctx)
        if self._conv is not None:
            window, ops = self._conv.window.decode(ctx), self._ops
            if operator is ops.recurrence_record and window.operator is ops.conv_update and ops.conv_record is not None:
                (windows, rows), (pool, index, records) = window.args, args
                states = (self._params, pool, index, records)
                found = ops.conv_record(raw, self._conv.taps, windows, rows, *states, out)
                if found is not None:
                    return found
            raw = raw._replace(mixed=self._conv.decode(raw.mixed, window))
        return operator(raw, self._params, *args, out)

    def _prefill(self, raw: RecurrenceInputs, ctx: ForwardContext, out: Tensor | None) -> Tensor:
        operator, args = self._matrix.prefill(ctx)
        if self._conv is not None:
            raw = raw._replace(mixed=self._conv.prefill(raw.mixed, ctx))
        return operator(raw, self._params, *args, out)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(PartConfig):
    """One layer's recurrence, with its convolution and norm. Subclasses implement `project`.

    `norm_name` and `out_name` are the weight names of the gated norm and of the last projection. A `conv_width` of 0
    stands for no convolution.
    """

    spec: Recurrence
    conv_width: int
    norm_name: str = "norm"
    out_name: str = "out_proj"
    norm_eps: float | None = None  # None: the model's
    sigmoid: bool = False  # activation of the gate: sigmoid if true, otherwise SiLU
    heads_are: ClassVar = "linear key heads"

    @property
    def inner(self) -> int:
        """The number of values of all heads of one rank together."""
        return self.spec.num_v_heads * self.spec.value_dim

    @property
    def conv_cut(self) -> Cut:
        """How ranks share the channels of the convolution: those of q, k and v."""
        keys = self.spec.num_k_heads * self.spec.key_dim
        return rows(keys, keys, self.inner)

    @abstractmethod
    def project(self, build: Build, name: str) -> Project:
        """Read the projection into the recurrence, and return its function."""

    def build(self, build: Build, name: str, layer: int) -> Block:
        project, finish = self.project(build, name), self.finish(build, name)
        conv: Convolution | None = None
        if self.conv_width:
            conv = Convolution(build.state(layer, CONV), *self.taps(build, name))
        matrix, params = build.state(layer, MATRIX), self.params(build, name, layer)
        recurrence = ConvRecurrence(build.ops, matrix, conv, params)

        def block(x: Tensor, ctx: ForwardContext) -> Tensor:
            mixed, a, b, gate = project(x, ctx)
            return finish(recurrence(mixed, a, b, ctx), gate)

        return block

    def taps(self, build: Build, name: str) -> tuple[Tensor, Tensor | None]:
        """Read the taps `[mixed_dim, W]`, and the bias `[mixed_dim]` or None.

        The checkpoint stores one convolution, or one each for q, k and v. Only the sum of their channels is checked
        (ModelFolderError), because some writers split the channels into even thirds.
        """
        source, shape, whole = build.weights, (self.spec.mixed_dim, 1, self.conv_width), f"{name}.conv1d.weight"
        apart = [f"{name}.{part}_conv1d.weight" for part in "qkv"]
        if source.has(whole) or not any(map(source.has, apart)):
            return source.get(whole, shape, cut=self.conv_cut).squeeze(1), None
        stored = [source.shape(part) or () for part in apart]
        parts = [source.get(part, (*found[:1], *shape[1:])) for part, found in zip(apart, stored, strict=True)]
        taps, own = torch.cat(parts).squeeze(1), self.conv_cut.part(shape, source.ranks)
        if len(taps) != own.whole[0]:
            raise ModelFolderError(
                f"the convolutions of {name} have {len(taps)} channels together; config.json asks for {own.whole[0]}"
            )
        return own.of(taps), None

    def params(self, build: Build, name: str, layer: int) -> RecurrenceParams:
        """Read the constants of the recurrence of layer `layer`."""
        source, fp32, heads = build.weights, torch.float32, (self.spec.num_v_heads,)
        flat = len(source.shape(f"{name}.A_log") or heads) == 1
        shape, cut = (heads, ROWS) if flat else ((1, 1, *heads, 1), Cut(2))
        a_log = source.get(f"{name}.A_log", shape, fp32, DUMMY_A_LOG, cut).flatten()
        dt_bias = source.get(f"{name}.dt_bias", (self.spec.num_decays,), fp32, DUMMY_DT_BIAS, ROWS)
        skip = None if self.spec.delta else source.get(f"{name}.D", heads, fp32, DUMMY_D, ROWS)
        return RecurrenceParams(self.spec, a_log, dt_bias, skip)

    def finish(self, build: Build, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Build the function from the recurrence's output `[T, HV, V]` and the gate `[T, HV * V]` to `[T, H]`."""
        norm = RMSNorm(build, f"{name}.{self.norm_name}", self.spec.value_dim, centred=False, eps=self.norm_eps)
        out = RowParallel(build, f"{name}.{self.out_name}", build.config.hidden_size, self.inner)
        gated_rmsnorm, sigmoid = build.ops.gated_rmsnorm, self.sigmoid

        def finish(heads: Tensor, gate: Tensor) -> Tensor:
            gate = torch.unflatten(gate, -1, heads.shape[1:])
            return out(gated_rmsnorm(heads, gate, norm.weight, norm.eps, sigmoid=sigmoid).flatten(1))

        return finish

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        """Return the spec of the stored state: the convolution's window, if any, and the matrices of all heads."""
        spec, operators, fp32 = self.spec, ("recurrence_decode", "recurrence_prefill"), "float32"
        heads, matrix = (spec.num_v_heads,), (spec.num_v_heads, spec.value_dim, spec.key_dim)
        update, key = matrix[:2], (spec.num_k_heads, spec.key_dim)
        decays = TensorSpec("decays", key if spec.per_key else heads, fp32)
        records = (TensorSpec("updates", update, fp32), TensorSpec("keys", key, fp32), decays)
        drafts, spaced = Recording("recurrence_verify", "recurrence_fold", records), None
        if not spec.per_key:  # states with a decay for each key are written at every token
            updates, keys = TensorSpec("updates", update, fp32, single=True), TensorSpec("keys", key, dtype)
            lines = (updates, keys, TensorSpec("scales", key[:1], fp32), decays)
            spaced = Recording("recurrence_record", "recurrence_flush", lines)
        kept = TensorSpec(MATRIX, matrix, state_dtype, operators, drafts, spaced)
        tensors: tuple[TensorSpec, ...] = (kept,)
        if self.conv_width:
            tensors = kept_window(spec.mixed_dim, self.conv_width, dtype), kept
        operations = DELTA_RULE_OPERATIONS if spec.delta else STATE_SPACE_OPERATIONS
        return (StateSpec(tensors, operations * math.prod(matrix)),)

    def cut(self, ranks: Ranks) -> Self:
        spec = self.spec
        num_keys = share(spec.num_k_heads, self.heads_are, ranks)
        num_values = num_keys * (spec.num_v_heads // spec.num_k_heads)
        return replace(self, spec=replace(spec, num_k_heads=num_keys, num_v_heads=num_values))

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (self.spec.mixed_dim + 2 * self.inner + self.spec.num_v_heads * (1 + self.spec.delta))


def read_group_norm(
    build: Build, name: str, inner: int, groups: int, sharing: int, eps: float | None = None, **style: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Read a norm over groups of heads: a function from heads `[T, HV, V]` and gate `[T, inner]` to `[T, inner]`.

    `inner` and `groups` are this rank's. `sharing` ranks hold a group together, and call it
    together. `style`: see `OpTable.gated_rmsnorm`.
    """
    ranks, size, cut, gated_rmsnorm = build.ranks, inner, ROWS, build.ops.gated_rmsnorm
    if sharing > 1:
        size, cut, groups = inner * ranks.size, WHOLE, ranks.size // sharing
    norm = RMSNorm(build, name, size, False, eps, cut)
    weight = norm.weight.view(groups, -1)

    def normed(heads: Tensor, gate: Tensor) -> Tensor:
        parts = [heads.flatten(1), gate]
        if sharing > 1:
            parts = [ranks.gather(part) for part in parts]
        read, gate = (torch.unflatten(part, -1, weight.shape) for part in parts)
        found = gated_rmsnorm(read, gate, weight, norm.eps, **style).flatten(1)
        if sharing > 1:
            return found.narrow(1, ranks.rank * inner, inner)
        return found

    return normed
