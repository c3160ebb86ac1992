"""The selective scan of rows with drafts, in torch: see VerifyIndex."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.metadata import VerifyIndex
from forkpoint.ops.parameters import Out, Records, ScanInputs, ScanParams
from forkpoint.ops.recurrence.verify import folded, verified
from forkpoint.ops.scan.reference import scan_changes, scan_tokens
from forkpoint.ops.state_copy.reference import write_slots


def scan_verify(
    inputs: ScanInputs, params: ScanParams, pool: Tensor, index: VerifyIndex, records: Records, out: Out = None
) -> Tensor:
    """Inputs of `T` tokens -> `[T, D]`, in `out` if given; `pool[P, D, N]` and the records as `index` says."""
    answer, (x, dt, b) = torch.empty_like(inputs.x) if out is None else out, records

    def advance(own: Tensor, at: Tensor, rows: Tensor, i: int) -> Tensor:
        mine, line = ScanInputs(*(value[at] for value in inputs)), index.line[rows].long()
        x[line, i], dt[line, i], b[index.write[rows].long(), i] = mine[:3]
        y, after = scan_tokens(ScanInputs(*(value.unsqueeze(0) for value in mine)), params, own)
        answer[at] = y.squeeze(0).to(answer.dtype)
        return after

    verified(_folded(pool, index, [*records, params.A, params.dt_bias]), pool, index, advance)
    return answer


def scan_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """The states after the pending tokens, and at the marks."""
    write_slots(pool, index.dst, _folded(pool, index, records))


def _folded(pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    x, dt, b, rates, dt_bias = records

    def fold(own: Tensor, rows: Tensor, i: int) -> Tensor:
        line, shared = index.line[rows].long(), index.read[rows].long()
        decay, new = scan_changes(x[line, i], dt[line, i], b[shared, i], rates, dt_bias)
        return decay * own + new

    return folded(pool, index, fold)
