"""The state operators of a model: which states they update, and from which slots they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forkpoint.ops.table import OpTable
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.buffers import ArenaBuffer

KINDS: Final = ("decode", "prefill")  # kinds of rows, in the order of TensorSpec.operators
Sources: TypeAlias = Mapping[str, Mapping[str, str]]


class StateOperators:
    """The state operators that the arena's layers name, each with the pools that it updates.

    An operator in `ops.redirects` reads the slots `decode_src` or `prefill_src`. For any other operator the states are
    first copied to the slots that it writes: it reads the slots `decode_placed` or `prefill_placed`.
    """

    def __init__(self, arena: ArenaBuffer, ops: OpTable, platform: Platform) -> None:
        self._ops, self._platform = ops, platform
        self._pools: dict[str, dict[str, list[Tensor]]] = {kind: {} for kind in KINDS}
        for _, tensor, pool in arena.states:
            for kind, operator in zip(KINDS, tensor.operators or (), strict=False):
                self._pools[kind].setdefault(operator, []).append(pool)
        # For each kind of rows: the array with the slots that each operator reads, by the operator's name.
        self.sources: Sources = {
            kind: {name: f"{kind}_src" if name in ops.redirects else f"{kind}_placed" for name in self._pools[kind]}
            for kind in KINDS
        }
        self.copies = any(source.endswith("placed") for kind in KINDS for source in self.sources[kind].values())

    def place(self, arrays: Mapping[str, npt.NDArray[Any]]) -> int:
        """Copy states for operators that cannot redirect to the slots that they write.

        Returns the number of bytes. One launch serves all layers of the decode rows, another one all layers of the
        segments.
        """
        if not self.copies:
            return 0
        copied = 0
        for kind in KINDS:
            src, dst = arrays[f"{kind}_src"], arrays[f"{kind}_dst"]
            moved = np.flatnonzero((src != dst) & (dst >= 0))
            operators, redirected = self._pools[kind].items(), f"{kind}_src"
            pools = [pool for name, own in operators if self.sources[kind][name] != redirected for pool in own]
            if len(moved) and pools:
                pair = self._platform.upload(np.stack([src[moved], dst[moved]]))
                self._ops.state_copy(pools, pair[0], pair[1])
                copied += len(moved) * sum(pool[0].numel() * pool.element_size() for pool in pools)
        return copied
