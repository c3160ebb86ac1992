"""Steps of a recurrence whose states are written every few tokens, in torch: see RecordIndex."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forkpoint.ops.metadata import DecodeIndex, RecordIndex
from forkpoint.ops.parameters import RecurrenceParams
from forkpoint.ops.recurrence.reference import prepare
from forkpoint.ops.state_copy.reference import read_slots, write_slots


def recurrence_record(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    params: RecurrenceParams,
    pool: Tensor,
    index: DecodeIndex,
    kept: RecordIndex,
    records: Sequence[Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """See `table.RecurrenceRecord`. With `c` the sum of g since the slot's state S, a key x reads
    `e^c S x + sum_i e^{c - c_i} (k_i . x) u_i` of the state before a token."""
    tokens, spec = prepare(mixed, a, b, params), params.spec
    states, (updates, keys, sums) = read_slots(pool, index.src).float(), records
    lines, held, group = kept.line.long().clamp(min=0), kept.held.long(), spec.num_v_heads // spec.num_k_heads
    q, k, past = (x.repeat_interleave(group, dim=-2) for x in (tokens.q, tokens.k, keys[lines]))
    total = tokens.g + torch.where(
        (held > 0).unsqueeze(1), sums[lines, (held - 1).clamp(min=0)], torch.zeros_like(tokens.g)
    )
    grown = total.exp().unsqueeze(-1)
    had, answer = (grown * (states * x.unsqueeze(-2)).sum(-1) for x in (k, q))
    folded = grown.unsqueeze(-1) * states
    for i in range(int(held.max())):
        here = (held > i).view(-1, 1, 1)
        share = torch.where(here, updates[lines, i] * (total - sums[lines, i]).exp().unsqueeze(-1), 0.0)
        key = torch.where(here, past[:, i], 0.0)
        had += (key * k).sum(-1, keepdim=True) * share
        answer += (key * q).sum(-1, keepdim=True) * share
        folded += share.unsqueeze(-1) * key.unsqueeze(-2)
    fresh = (tokens.v - had if spec.delta else tokens.v) * tokens.beta.unsqueeze(-1)
    answer += (k * q).sum(-1, keepdim=True) * fresh
    if params.D is not None:
        answer += params.D.unsqueeze(-1) * tokens.v
    folds = kept.folds > 0
    write_slots(pool, torch.where(folds, index.dst, -1), folded + fresh.unsqueeze(-1) * k.unsqueeze(-2))
    write_slots(pool, torch.where(folds | (index.src == index.dst), -1, index.dst), states)
    at = torch.nonzero((kept.line >= 0) & ~folds)[:, 0]
    for record, value in zip(records, (fresh, tokens.k, total), strict=True):
        record[lines[at], held[at]] = value[at]
    return answer.to(mixed.dtype) if out is None else out.copy_(answer)
