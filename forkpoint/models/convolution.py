"""Short causal convolutions over each channel's last inputs, and the layer part that consists of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import LayerSpec, Recording, StateSpec, TensorSpec
from forkpoint.models.config import Block, Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import ROWS, rows, share
from forkpoint.models.layers import RowParallel, read_projection
from forkpoint.models.states import LayerState, StateCall
from forkpoint.ops.parameters import ConvTaps
from forkpoint.ops.ranks import Ranks

CONV: Final = "conv"  # name of the window of a layer's first convolution
WINDOW: Final = "window"  # name of the window of a layer's LastInputs


class Convolution:
    """Convolve with `taps[D, W]` and `bias[D]` over a layer's `window`, then apply SiLU if `silu`."""

    def __init__(self, window: LayerState, taps: Tensor, bias: Tensor | None, silu: bool = True) -> None:
        self.window = window
        # stored tap by tap, the order in which kernels read them
        self.taps = ConvTaps(taps.t().contiguous().t(), bias, silu)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Convolve `x[T, D] -> [T, D]`, decode rows first, then prefill segments; the windows are updated."""
        split = ctx.num_decodes
        if split == 0:
            return self.prefill(x, ctx)
        if split == x.shape[0]:
            return self.decode(x, self.window.decode(ctx))
        return torch.cat((self.decode(x[:split], self.window.decode(ctx)), self.prefill(x[split:], ctx)))

    def decode(self, x: Tensor, call: StateCall) -> Tensor:
        """Convolve the tokens `[T, D]` of decode rows, drafts included, by the window's call for them."""
        return call.operator(x, self.taps, *call.args)

    def prefill(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Convolve the tokens `[T, D]` of prefill segments, and write the windows at their ends."""
        call = self.window.prefill(ctx)
        return call.operator(x, self.taps, *call.args)


class LastInputs:
    """Returns each token's last W inputs. Those of earlier steps are in a layer's state `window`."""

    def __init__(self, window: LayerState) -> None:
        self._window = window

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Map inputs `x[T, D]` to `[T, W, D]`, the token's own input last, and update the windows.

        There are zeros before the first token of a sequence.
        """
        split = ctx.num_decodes
        parts = []
        if split:
            operator, args = self._window.decode(ctx)
            parts.append(operator(x[:split], *args))
        if split < len(x):
            operator, args = self._window.prefill(ctx)
            parts.append(operator(x[split:], *args))
        return torch.cat(parts)


def kept_window(channels: int, width: int, dtype: str, name: str = CONV) -> TensorSpec:
    """Return the spec of a convolution's state: the last `width - 1` inputs."""
    inputs = (TensorSpec("inputs" if name == CONV else f"{name}_inputs", (channels,), dtype, single=True),)
    drafts = Recording("conv_verify", "conv_fold", inputs)
    return TensorSpec(name, (width - 1, channels), dtype, ("conv_update", "conv_prefill"), drafts)


def kept_inputs(channels: int, width: int, dtype: str) -> TensorSpec:
    """Return the spec of the state of `LastInputs` for windows of `width` inputs."""
    inputs = (TensorSpec("window_inputs", (channels,), dtype, single=True),)
    drafts = Recording("window_verify", "conv_fold", inputs)
    return TensorSpec(WINDOW, (width - 1, channels), dtype, ("window_update", "window_prefill"), drafts)


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
        own_bias = build.weights.bias(f"{name}.conv", size, bias, ROWS)
        conv = Convolution(build.state(layer, CONV), taps, own_bias, silu=False)
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
