"""The convolution of rows with drafts, in torch: see VerifyIndex."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from forkpoint.ops.conv1d.reference import convolved
from forkpoint.ops.metadata import VerifyIndex
from forkpoint.ops.parameters import ConvTaps, Records
from forkpoint.ops.state_copy.reference import read_slots, write_slots


def conv_verify(x: Tensor, taps: ConvTaps, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    """`x[T, D]` -> `[T, D]`; reads and writes `pool[P, W-1, D]` and records `[L, M, D]` as `index` says."""
    windows, (lines,) = _folded(pool, index, records), records
    out = torch.empty_like(x)
    for row, (first, end) in enumerate(pairwise(index.cu_tokens.tolist())):
        inputs = torch.cat((windows[row].to(x.dtype), x[first:end]))
        out[first:end] = convolved(inputs, taps)
        if end == first + 1:
            windows[row] = inputs[1:]
        else:
            lines[index.line[row], : end - first] = x[first:end]
    write_slots(pool, index.dst, windows)
    return out


def conv_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """The windows after the pending tokens, and at the marks."""
    write_slots(pool, index.dst, _folded(pool, index, records))


def _folded(pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    windows, behind, (lines,) = read_slots(pool, index.src), pool.shape[1], records
    columns = (index.pending, index.mark, index.mark_dst, index.line)
    for row, (count, mark, slot, line) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if count:
            inputs = torch.cat((windows[row], lines[line, :count].to(pool.dtype)))
            windows[row] = inputs[count : count + behind]
            if 0 < mark <= count:  # beyond where drafts were missed
                pool[slot] = inputs[mark : mark + behind]
    return windows
