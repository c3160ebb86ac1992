"""Parts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from forkpoint.cache.layout import LayerSpec
from forkpoint.models.config import Block, Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import Cuts
from forkpoint.ops.ranks import Ranks


@dataclass(frozen=True, slots=True)
class ParallelConfig(PartConfig):
    """Parts that see the same input, and whose outputs are added up. Names may be empty."""

    parts: Sequence[PartConfig]
    name: str = ""

    def build(self, build: Build, name: str, layer: int) -> Block:
        build = replace(build, defers=False)
        names = ((part, f"{name.removesuffix('.')}.{part.name}".removesuffix(".")) for part in self.parts)
        first, *others = (part.build(build, inner, layer) for part, inner in names)

        def together(x: Tensor, ctx: ForwardContext) -> Tensor:
            total = first(x, ctx)
            for block in others:
                total = total + block(x, ctx)
            return total

        return together

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return tuple(spec for part in self.parts for spec in part.kept(dtype, state_dtype))

    def cut(self, ranks: Ranks, hidden_size: int) -> tuple[ParallelConfig, Cuts]:
        found = [inner.cut(ranks, hidden_size) for inner in self.parts]
        cuts = {name: cut for _, own in found for name, cut in own.items()}
        return replace(self, parts=[inner for inner, _ in found]), cuts

    def num_weights(self, hidden_size: int) -> int:
        return sum(part.num_weights(hidden_size) for part in self.parts)

    def flops_per_pair(self) -> int:
        return sum(part.flops_per_pair() for part in self.parts)
