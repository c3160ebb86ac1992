"""Gated short convolutions, which keep the last inputs of each channel and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from forkpoint.cache.layout import LayerSpec, StateSpec
from forkpoint.models.config import Block, Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import Convolution, kept_window
from forkpoint.models.cuts import Cuts, inward, rows, share
from forkpoint.models.layers import RowParallel, read_projection
from forkpoint.ops.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig(PartConfig):
    """One layer's convolution of `width` taps over `channels`, the model's hidden size."""

    channels: int
    width: int
    bias: bool = False
    name: str = "conv"

    def build(self, build: Build, name: str, layer: int) -> Block:
        """`out(c * conv(b * x))`, with `b`, `c` and `x` from one projection."""
        size, hidden, bias = self.channels, build.config.hidden_size, self.bias
        project = read_projection(build, f"{name}.in_proj", 3 * size, hidden, bias)
        taps = build.weights.get(f"{name}.conv.weight", (size, 1, self.width)).squeeze(1)
        shift = build.weights.get(f"{name}.conv.bias", (size,)) if bias else None
        conv = Convolution(build.ops, layer, taps, shift, silu=False)
        out = RowParallel(build, f"{name}.out_proj", hidden, size, bias)

        def block(x: Tensor, ctx: ForwardContext) -> Tensor:
            before, after, x = project(x).chunk(3, dim=-1)
            return out(after * conv(before * x, ctx))

        return block

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (StateSpec((kept_window(self.channels, self.width, dtype),)),)

    def cut(self, ranks: Ranks, hidden_size: int) -> tuple[ShortConvConfig, Cuts]:
        channels = (self.channels, 1)
        cuts = {"in_proj": rows(channels, channels, channels), "conv": rows(channels)}
        own = replace(self, channels=share(self.channels, "channels", ranks))
        return own, cuts | inward("out_proj", hidden_size, ranks)

    def num_weights(self, hidden_size: int) -> int:
        return 4 * hidden_size * self.channels
