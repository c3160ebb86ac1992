"""What recurrent layers share: a short convolution, then the recurrence, over decode rows and prefill segments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from forkpoint.cache.layout import DELTA_RULE_OPERATIONS, STATE_SPACE_OPERATIONS, StateSpec, TensorSpec
from forkpoint.models.config import Block
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import Convolution, kept_window
from forkpoint.models.layers import RMSNorm, RowParallel
from forkpoint.ops.parameters import Recurrence, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.table import OpTable

# Slow decay for made-up weights, so that their states matter.
DUMMY_A_LOG = (-4.0, -1.0)
DUMMY_DT_BIAS = (-3.0, -1.0)
RECORDS = ("updates", "keys", "decays")  # in the order of recurrence_verify,
SPACED = ("updates", "keys", "scales", "decays")  # and of recurrence_record


class ConvRecurrence:
    """The states of layer `layer`: a window `conv` under `taps[D, W]` and `bias[D]`, and a `matrix`."""

    def __init__(self, ops: OpTable, layer: int, taps: Tensor, bias: Tensor | None, params: RecurrenceParams) -> None:
        self._ops, self._layer, self._params = ops, layer, params
        self._conv = Convolution(ops, layer, taps, bias)

    def __call__(self, mixed: Tensor, a: Tensor, b: Tensor | None, ctx: ForwardContext) -> Tensor:
        """`mixed[T, mixed_dim]`, `a`, `b` `[T, HV]` -> `[T, HV, V]`; reads and writes the slots that `ctx` names."""
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
        self._decode(decodes, ctx, out[:split])
        self._prefill(prefills, ctx, out[split:])
        return out

    def _decode(self, raw: RecurrenceInputs, ctx: ForwardContext, out: Tensor | None) -> Tensor:
        cache, slots = ctx.caches[self._layer], ctx.decode
        state = (self._params, cache["matrix"])
        if ctx.record is not None:
            recorded = (*state, ctx.record, [cache[name] for name in SPACED], out)
            if ctx.verify is None and self._ops.conv_record is not None:
                rows = slots["conv_update"]
                found = self._ops.conv_record(raw, self._conv.taps, cache["conv"], rows, *recorded)
                if found is not None:
                    return found
            return self._ops.recurrence_record(raw._replace(mixed=self._conv.decode(raw.mixed, ctx)), *recorded)
        inputs = raw._replace(mixed=self._conv.decode(raw.mixed, ctx))
        if ctx.verify is not None:
            records = [cache[name] for name in RECORDS]
            found = self._ops.recurrence_verify(inputs, *state, ctx.verify, records)
            return found if out is None else out.copy_(found)
        return self._ops.recurrence_decode(inputs, *state, slots["recurrence_decode"], out)

    def _prefill(self, raw: RecurrenceInputs, ctx: ForwardContext, out: Tensor | None) -> Tensor:
        inputs, index = raw._replace(mixed=self._conv.prefill(raw.mixed, ctx)), ctx.prefill["recurrence_prefill"]
        return self._ops.recurrence_prefill(inputs, self._params, ctx.caches[self._layer]["matrix"], index, out)


def gated_heads(
    recurrence: ConvRecurrence,
    ops: OpTable,
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]],
    norm: RMSNorm,
    out: RowParallel,
    sigmoid: bool = False,
) -> Block:
    """Projection, short convolution, recurrence, gated norm of each head, projection. `project` gives `mixed`, `a` and
    `b` of the recurrence, and the gate `[T, HV * V]`."""

    def block(x: Tensor, ctx: ForwardContext) -> Tensor:
        mixed, a, b, gate = project(x)
        heads = recurrence(mixed, a, b, ctx)
        gate = torch.unflatten(gate, -1, heads.shape[1:])
        return out(ops.gated_rmsnorm(heads, gate, norm.weight, norm.eps, sigmoid=sigmoid).flatten(1))

    return block


def kept_state(spec: Recurrence, conv_width: int, dtype: str, state_dtype: str) -> StateSpec:
    """The convolution's window and the matrices of all heads."""
    matrix = (spec.num_v_heads, spec.value_dim, spec.key_dim)
    operators = ("recurrence_decode", "recurrence_prefill")
    heads = (spec.num_v_heads,)
    update, key = (*heads, spec.value_dim), (spec.num_k_heads, spec.key_dim)
    kinds = (
        (RECORDS, (update, key, key if spec.per_key else heads), ("float32", "float32", "float32")),
        (SPACED, (update, key, key[:1], heads), ("float32", dtype, "float32", "float32")),
    )
    records, spaced = (tuple(TensorSpec(*each) for each in zip(*kind, strict=True)) for kind in kinds)
    kept = (records,) if spec.per_key else (records, spaced)  # with decays for each key every state is written
    tensors = (
        kept_window(spec.mixed_dim, conv_width, dtype),
        TensorSpec("matrix", matrix, state_dtype, operators, "recurrence_fold", *kept),
    )
    operations = DELTA_RULE_OPERATIONS if spec.delta else STATE_SPACE_OPERATIONS
    return StateSpec(tensors, operations * math.prod(matrix))
