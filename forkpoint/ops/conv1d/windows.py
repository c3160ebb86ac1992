"""Windows over each token's last inputs in torch. Their state is that of a convolution.

VerifyIndex describes rows with drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.conv1d.reference import folded_windows
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import Records
from forkpoint.ops.state_copy.reference import read_slots, verified, write_slots


def window_prefill(x: Tensor, pool: Tensor, index: SegmentIndex) -> Tensor:
    """Implement `table.TakeWindows` for the segments' inputs `x[T, D]`, end to end.

    The window after each segment goes to `index.dst`, the one after `save_pos` tokens to `save_dst`.
    """
    behind = pool.shape[1]
    before = read_slots(pool, index.src).to(x.dtype)
    out, stored, saved = list[Tensor](), list[Tensor](), list[Tensor]()
    save_ptr, save_pos = index.save_ptr.tolist(), index.save_pos.tolist()
    start = 0
    for n, length in enumerate(index.on_host()):
        inputs = torch.cat((before[n], x[start : start + length]))
        out.append(inputs.unfold(0, behind + 1, 1).transpose(1, 2))
        stored.append(inputs[length : length + behind])
        saved += [inputs[p : p + behind] for p in save_pos[save_ptr[n] : save_ptr[n + 1]]]
        start += length
    write_slots(pool, index.dst, torch.stack(stored))
    if saved:
        write_slots(pool, index.save_dst, torch.stack(saved))
    return torch.cat(out)


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
