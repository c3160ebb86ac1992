"""Gated short convolutions, which keep the last inputs of each channel and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from forkpoint.cache.layout import LayerSpec, StateSpec
from forkpoint.models.config import Build, PartConfig
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

    def build(self, build: Build, name: str, layer: int) -> ShortConv:
        return ShortConv(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (StateSpec((kept_window(self.channels, self.width, dtype),)),)

    def cut(self, ranks: Ranks, hidden_size: int) -> tuple[ShortConvConfig, Cuts]:
        channels = (self.channels, 1)
        cuts = {"in_proj": rows(channels, channels, channels), "conv": rows(channels)}
        own = replace(self, channels=share(self.channels, "channels", ranks))
        return own, cuts | inward("out_proj", hidden_size, ranks)

    def num_weights(self, hidden_size: int) -> int:
        return 4 * hidden_size * self.channels


class ShortConv:
    """`out(c * conv(b * x))`, with `b`, `c` and `x` from one projection."""

    def __init__(self, build: Build, name: str, layer: int, config: ShortConvConfig) -> None:
        size, hidden, bias = config.channels, build.config.hidden_size, config.bias
        self._input = read_projection(build, f"{name}.in_proj", 3 * size, hidden, bias)
        taps = build.weights.get(f"{name}.conv.weight", (size, 1, config.width)).squeeze(1)
        shift = build.weights.get(f"{name}.conv.bias", (size,)) if bias else None
        self._conv = Convolution(build.ops, layer, taps, shift, silu=False)
        self._out = RowParallel(build, f"{name}.out_proj", hidden, size, bias)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`x[T, H] -> [T, H]`; reads and writes the slots that `ctx` names."""
        before, after, x = self._input(x).chunk(3, dim=-1)
        return self._out(after * self._conv(before * x, ctx))
