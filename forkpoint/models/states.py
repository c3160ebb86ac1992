"""A layer's state tensors as its mixer sees them: the operator, slots and records of one step.

`LayerState.decode` alone chooses how a step runs decode rows: plainly, with drafts to verify, or with spaced writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from forkpoint.cache.layer_spec import TensorSpec
from forkpoint.models.context import ForwardContext
from forkpoint.ops.metadata import RecordIndex, VerifyIndex
from forkpoint.ops.table import OpTable


class StateCall(NamedTuple):
    """An operator, and its arguments after the layer's inputs and constants: pool, index and any records."""

    operator: Callable[..., Tensor]
    args: tuple[Any, ...]


class LayerState:
    """One state tensor of layer `layer`. Its spec names the operators and the records."""

    def __init__(self, ops: OpTable, layer: int, spec: TensorSpec) -> None:
        assert spec.operators is not None, f"{spec.name} is not a state"
        self._ops, self._layer, self._spec = ops, layer, spec
        self._plain, self._prefill = spec.operators

    def decode(self, ctx: ForwardContext) -> StateCall:
        """Return the call for the step's decode rows."""
        cache, spec = ctx.caches[self._layer], self._spec
        recording = spec.spaced
        index: RecordIndex | VerifyIndex | None = ctx.record
        if recording is None or index is None:
            recording, index = spec.drafts, ctx.verify
        if recording is None or index is None:
            return StateCall(getattr(self._ops, self._plain), (cache[spec.name], ctx.decode[self._plain]))
        records = [cache[record.name] for record in recording.records]
        return StateCall(getattr(self._ops, recording.decode), (cache[spec.name], index, records))

    def prefill(self, ctx: ForwardContext) -> StateCall:
        """Return the call for the step's prefill segments."""
        pool = ctx.caches[self._layer][self._spec.name]
        return StateCall(getattr(self._ops, self._prefill), (pool, ctx.prefill[self._prefill]))
