"""Windows over each token's last inputs in torch, which convolutions multiply with their taps.

A slot has the last W-1 raw inputs, oldest first. VerifyIndex describes rows with drafts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forkpoint.ops.metadata import DecodeIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import Records
from forkpoint.ops.state_copy.reference import folded, read_slots, verified, write_slots


def segments(x: Tensor, pool: Tensor, index: SegmentIndex) -> Iterator[Tensor]:
    """Yield the raw inputs `[W-1+L, D]` of each segment of `x[T, D]`, those of its window in `pool[P, W-1, D]` first.

    At the end, the window after each segment goes to `index.dst`, the one after `save_pos` tokens to `save_dst`.
    """
    behind = pool.shape[1]
    before = read_slots(pool, index.src).to(x.dtype)
    stored: list[Tensor] = []
    saved: list[Tensor] = []
    save_ptr, save_pos = index.save_ptr.tolist(), index.save_pos.tolist()
    start = 0
    for n, length in enumerate(index.on_host()):
        inputs = torch.cat((before[n], x[start : start + length]))
        yield inputs
        stored.append(inputs[length : length + behind])
        saved += [inputs[p : p + behind] for p in save_pos[save_ptr[n] : save_ptr[n + 1]]]
        start += length
    write_slots(pool, index.dst, torch.stack(stored))
    if saved:
        write_slots(pool, index.save_dst, torch.stack(saved))


def window_prefill(x: Tensor, pool: Tensor, index: SegmentIndex) -> Tensor:
    """Implement `table.TakeWindows` for the segments' inputs `x[T, D]`, end to end."""
    width = pool.shape[1] + 1
    return torch.cat([inputs.unfold(0, width, 1).transpose(1, 2) for inputs in segments(x, pool, index)])


def window_update(x: Tensor, pool: Tensor, index: DecodeIndex) -> Tensor:
    """Implement `table.TakeWindows` for one token of each row: `x[B, D]` -> `[B, W, D]`."""
    inputs = torch.cat((read_slots(pool, index.src).to(x.dtype), x.unsqueeze(1)), dim=1)
    write_slots(pool, index.dst, inputs[:, 1:])
    return inputs


def window_verify(x: Tensor, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    """Implement `table.WindowVerify`."""
    (lines,), out = records, x.new_empty(x.shape[0], pool.shape[1] + 1, x.shape[1])

    def advance(own: Tensor, at: Tensor, rows: Tensor, i: int) -> Tensor:
        lines[index.line[rows].long(), i] = x[at]
        out[at] = torch.cat((own.to(x.dtype), x[at].unsqueeze(1)), dim=1)
        return out[at][:, 1:]

    verified(folded_windows(pool, index, records), pool, index, advance)
    return out


def folded_windows(pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    """Return the windows `[B, W-1, D]` fp32 after the pending tokens, and store the windows at the marks."""
    (lines,) = records

    def fold(own: Tensor, rows: Tensor, i: int) -> Tensor:
        return torch.cat((own[:, 1:], lines[index.line[rows].long(), i].unsqueeze(1).float()), dim=1)

    return folded(pool, index, fold)
