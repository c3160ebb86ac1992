"""Short causal convolutions over each channel's last inputs, and the layer part that consists of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from forkpoint.cache.layout import LayerSpec, StateSpec, TensorSpec
from forkpoint.models.config import Block, Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import ROWS, rows, share
from forkpoint.models.layers import RowParallel, read_projection
from forkpoint.ops.parameters import ConvTaps
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import OpTable

CONV: Final = "conv"  # name of the window of a layer's first convolution


class Convolution:
    """Convolve with `taps[D, W]` and `bias[D]` over the window `name` of layer `layer`, then apply SiLU if `silu`."""

    def __init__(
        self, ops: OpTable, layer: int, taps: Tensor, bias: Tensor | None, silu: bool = True, name: str = CONV
    ) -> None:
        self._ops, self._layer, self._name = ops, layer, name
        # stored tap by tap, the order in which kernels read them
        self.taps = ConvTaps(taps.t().contiguous().t(), bias, silu)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Convolve `x[T, D] -> [T, D]`, decode rows first, then prefill segments; the windows are updated."""
        split = ctx.num_decodes
        if split == 0:
            return self.prefill(x, ctx)
        if split == x.shape[0]:
            return self.decode(x, ctx)
        return torch.cat((self.decode(x[:split], ctx), self.prefill(x[split:], ctx)))

    def decode(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Convolve the tokens `[T, D]` of decode rows, drafts included. Update windows, or write records to verify."""
        cache = ctx.caches[self._layer]
        if ctx.verify is not None:
            records = (cache[_inputs_of(self._name)],)
            return self._ops.conv_verify(x, self.taps, cache[self._name], ctx.verify, records)
        rows = ctx.decode["conv_update"]
        return self._ops.conv_update(x, self.taps, cache[self._name], rows)

    def prefill(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Convolve the tokens `[T, D]` of prefill segments, and write the windows at their ends."""
        pool, segments = ctx.caches[self._layer][self._name], ctx.prefill["conv_prefill"]
        return self._ops.conv_prefill(x, self.taps, pool, segments)


class LastInputs:
    """Takes each token's last W inputs; earlier ones are the state `window` of layer `layer`."""

    def __init__(self, ops: OpTable, layer: int) -> None:
        self._ops, self._layer = ops, layer

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Map inputs `x[T, D]` to `[T, W, D]`, the token's own input last, and update the windows.

        There are zeros before the first token of a sequence.
        """
        split = ctx.num_decodes
        parts = []
        if split:
            parts.append(self._decode(x[:split], ctx))
        if split < len(x):
            cache, segments = ctx.caches[self._layer], ctx.prefill["window_prefill"]
            parts.append(self._ops.window_prefill(x[split:], cache["window"], segments))
        return torch.cat(parts)

    def _decode(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        cache = ctx.caches[self._layer]
        if ctx.verify is not None:
            return self._ops.window_verify(x, cache["window"], ctx.verify, (cache["window_inputs"],))
        return self._ops.window_update(x, cache["window"], ctx.decode["window_update"])


def _inputs_of(window: str) -> str:
    """Return the name of the records of a window."""
    return "inputs" if window == CONV else f"{window}_inputs"


def kept_window(channels: int, width: int, dtype: str, name: str = CONV) -> TensorSpec:
    """Return the spec of a convolution's state: the last `width - 1` inputs; its records are those of drafts."""
    inputs = (TensorSpec(_inputs_of(name), (channels,), dtype, single=True),)
    return TensorSpec(name, (width - 1, channels), dtype, ("conv_update", "conv_prefill"), "conv_fold", inputs)


def kept_inputs(channels: int, width: int, dtype: str) -> TensorSpec:
    """Return the spec of the state of `LastInputs` for windows of `width` inputs; its records are those of drafts."""
    inputs = (TensorSpec("window_inputs", (channels,), dtype, single=True),)
    return TensorSpec("window", (width - 1, channels), dtype, ("window_update", "window_prefill"), "conv_fold", inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig(PartConfig):
    """One layer's convolution with `width` taps over `channels`: the hidden size, or one rank's share of it."""

    channels: int
    width: int
    bias: bool = False
    name: str = "conv"

    def build(self, build: Build, name: str, layer: int) -> Block:
        """Build `out(c * conv(b * x))`, where one projection computes `b`, `c` and `x`."""
        size, hidden, bias = self.channels, build.config.hidden_size, self.bias
        project = read_projection(build, f"{name}.in_proj", 3 * size, hidden, bias, cut=rows(size, size, size))
        taps = build.weights.get(f"{name}.conv.weight", (size, 1, self.width), cut=ROWS).squeeze(1)
        conv = Convolution(build.ops, layer, taps, build.weights.bias(f"{name}.conv", size, bias, ROWS), silu=False)
        out = RowParallel(build, f"{name}.out_proj", hidden, size, bias)

        def block(x: Tensor, ctx: ForwardContext) -> Tensor:
            before, after, x = project(x).chunk(3, dim=-1)
            return out(after * conv(before * x, ctx))

        return block

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (StateSpec((kept_window(self.channels, self.width, dtype),)),)

    def cut(self, ranks: Ranks) -> ShortConvConfig:
        return replace(self, channels=share(self.channels, "channels", ranks))

    def num_weights(self, hidden_size: int) -> int:
        return 4 * hidden_size * self.channels
