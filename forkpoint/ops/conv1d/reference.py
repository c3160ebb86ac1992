"""Causal depthwise convolution in torch: `y_t = act(bias + sum_j w_j x_{t-W+1+j})`.

A slot's window is the last W-1 raw inputs, oldest first. Sums are in fp32 with one rounding at the end;
products and sums are separate operations, because a fused one may round differently in the tail of a vector
loop. VerifyIndex describes rows with drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.activation.reference import silu
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import ConvTaps, Records
from forkpoint.ops.state_copy.reference import folded, read_slots, verified, write_slots

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
    behind = taps.weight.shape[1] - 1
    windows = read_slots(pool, index.src)
    out = torch.empty_like(x)
    stored: list[Tensor] = []
    saved: list[Tensor] = []
    save_ptr, save_pos = index.save_ptr.tolist(), index.save_pos.tolist()
    start = 0
    for n, length in enumerate(index.on_host()):
        inputs = torch.cat((windows[n].to(x.dtype), x[start : start + length]))
        for low in range(0, length, ROW_TILE):
            high = min(low + ROW_TILE, length)
            out[start + low : start + high] = convolved(inputs[low : high + behind], taps)
        stored.append(inputs[length : length + behind])
        saved += [inputs[p : p + behind] for p in save_pos[save_ptr[n] : save_ptr[n + 1]]]
        start += length
    write_slots(pool, index.dst, torch.stack(stored))
    if saved:
        write_slots(pool, index.save_dst, torch.stack(saved))
    return out


def conv_update(x: Tensor, taps: ConvTaps, pool: Tensor, index: DecodeIndex) -> Tensor:
    """Convolve one token per row: `x[B, D]` -> `[B, D]`. Reads the windows `index.src`, writes `index.dst`."""
    inputs = torch.cat((read_slots(pool, index.src).to(x.dtype), x.unsqueeze(1)), dim=1)
    write_slots(pool, index.dst, inputs[:, 1:])
    return convolved(inputs, taps).squeeze(1).to(x.dtype)


def conv_verify(x: Tensor, taps: ConvTaps, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    """Convolve rows with drafts: `x[T, D]` -> `[T, D]`. `index` says which windows and records are used."""
    (lines,), out = records, torch.empty_like(x)

    def advance(own: Tensor, at: Tensor, rows: Tensor, i: int) -> Tensor:
        lines[index.line[rows].long(), i] = x[at]
        inputs = torch.cat((own.to(x.dtype), x[at].unsqueeze(1)), dim=1)
        out[at] = convolved(inputs, taps).squeeze(1).to(x.dtype)
        return inputs[:, 1:]

    verified(folded_windows(pool, index, records), pool, index, advance)
    return out


def conv_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """Fold the pending tokens' records into the windows, and store the windows at the marks."""
    write_slots(pool, index.dst, folded_windows(pool, index, records))


def folded_windows(pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    """Return the windows `[B, W-1, D]` fp32 after the pending tokens, and store the windows at the marks."""
    (lines,) = records

    def fold(own: Tensor, rows: Tensor, i: int) -> Tensor:
        return torch.cat((own[:, 1:], lines[index.line[rows].long(), i].unsqueeze(1).float()), dim=1)

    return folded(pool, index, fold)
