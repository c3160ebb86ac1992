"""Causal depthwise convolution in torch: `y_t = act(bias + sum_j w_j x_{t-W+1+j})`.

Sums are in fp32 with one rounding at the end. Products and sums are separate operations, because a fused one may round
differently in the tail of a vector loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.activation.reference import silu
from forkpoint.ops.conv1d.windows import folded_windows, segments, window_update, window_verify
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import ConvTaps, Records
from forkpoint.ops.state_copy.reference import write_slots

ROW_TILE = 32  # tokens computed together, so that their sums stay in a core's cache


def convolved(inputs: Tensor, taps: ConvTaps) -> Tensor:
    """Convolve `inputs[..., W-1+L, D]`; return fp32 `[..., L, D]`."""
    width = taps.weight.shape[1]
    length = inputs.shape[-2] - width + 1
    wide, weights = inputs.float(), taps.weight.float().t().contiguous()
    total = wide[..., :length, :] * weights[0]
    for j in range(1, width):
        total += wide[..., j : j + length, :] * weights[j]
    if taps.bias is not None:
        total += taps.bias.float()
    return silu(total) if taps.silu else total


def conv_prefill(x: Tensor, taps: ConvTaps, pool: Tensor, index: SegmentIndex) -> Tensor:
    """Convolve the segments' raw inputs `x[T, D]`, end to end, with windows in `pool[P, W-1, D]`; return `[T, D]`.

    The window after each segment goes to `index.dst`, the one after `save_pos` tokens to `save_dst`.
    """
    out, behind, start = torch.empty_like(x), pool.shape[1], 0
    for inputs in segments(x, pool, index):
        length = len(inputs) - behind
        for low in range(0, length, ROW_TILE):
            high = min(low + ROW_TILE, length)
            out[start + low : start + high] = convolved(inputs[low : high + behind], taps)
        start += length
    return out


def conv_update(x: Tensor, taps: ConvTaps, pool: Tensor, index: DecodeIndex) -> Tensor:
    """Convolve one token per row: `x[B, D]` -> `[B, D]`. Reads the windows `index.src`, writes `index.dst`."""
    return convolved(window_update(x, pool, index), taps).squeeze(1).to(x.dtype)


def conv_verify(x: Tensor, taps: ConvTaps, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    """Convolve rows with drafts: `x[T, D]` -> `[T, D]`. `index` says which windows and records are used."""
    return convolved(window_verify(x, pool, index, records), taps).squeeze(1).to(x.dtype)


def conv_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """Fold the pending tokens' records into the windows, and store the windows at the marks."""
    write_slots(pool, index.dst, folded_windows(pool, index, records))
