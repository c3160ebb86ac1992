"""Short convolutions over a window of each channel's last inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.cache.layout import TensorSpec
from forkpoint.models.context import ForwardContext
from forkpoint.ops.parameters import ConvTaps
from forkpoint.ops.table import OpTable


class Convolution:
    """`taps[D, W]` and `bias[D]` over the window `conv` of layer `layer`, then SiLU or nothing."""

    def __init__(self, ops: OpTable, layer: int, taps: Tensor, bias: Tensor | None, silu: bool = True) -> None:
        self._ops, self._layer = ops, layer
        self.taps = ConvTaps(taps.t().contiguous().t(), bias, silu)  # tap by tap, as kernels read it

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`x[T, D] -> [T, D]`: decode rows, then prefill segments."""
        split = ctx.num_decodes
        parts = [self.decode(x[:split], ctx)] if split else []
        if split < x.shape[0]:
            parts.append(self.prefill(x[split:], ctx))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Of the decode rows, with their drafts if they have any."""
        cache = ctx.caches[self._layer]
        if ctx.verify is not None:
            records = (cache["inputs"],)
            return self._ops.conv_verify(x, self.taps, cache["conv"], ctx.verify, records)
        rows = ctx.decode["conv_update"]
        return self._ops.conv_update(x, self.taps, cache["conv"], rows)

    def prefill(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Of the prefill segments."""
        pool, segments = ctx.caches[self._layer]["conv"], ctx.prefill["conv_prefill"]
        return self._ops.conv_prefill(x, self.taps, pool, segments)


def kept_window(channels: int, width: int, dtype: str) -> TensorSpec:
    """The last inputs of `width` taps, and of drafts the inputs of each token."""
    inputs = (TensorSpec("inputs", (channels,), dtype, single=True),)
    return TensorSpec("conv", (width - 1, channels), dtype, ("conv_update", "conv_prefill"), "conv_fold", inputs)
