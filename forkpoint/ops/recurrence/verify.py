"""The recurrence of rows with drafts, in torch: see VerifyIndex."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forkpoint.ops.metadata import VerifyIndex
from forkpoint.ops.parameters import RecurrenceParams
from forkpoint.ops.recurrence.reference import Tokens, advance, fold, prepare
from forkpoint.ops.state_copy.reference import read_slots, write_slots


def recurrence_verify(
    mixed: Tensor,
    a: Tensor,
    b: Tensor | None,
    params: RecurrenceParams,
    pool: Tensor,
    index: VerifyIndex,
    records: Sequence[Tensor],
) -> Tensor:
    """`mixed[T, mixed_dim]`, `a`, `b` `[T, HV]` -> `[T, HV, V]`; reads and writes `pool[P, HV, V, K]` and the records
    as `index` says. Goes over all rows' first tokens, then over the second ones of those that have two, and so on."""
    states, (updates, keys, decays) = _folded(pool, index, records), records
    tokens, spec = prepare(mixed, a, b, params), params.spec
    first, lens, lines = index.cu_tokens[:-1].long(), index.cu_tokens.diff(), index.write.long()
    drafting = lens > 1
    write_slots(pool, torch.where(drafting, index.dst, -1), states)
    out = mixed.new_empty(mixed.shape[0], spec.num_v_heads, spec.value_dim)
    for step in range(int(lens.max())):
        live = torch.nonzero(lens > step)[:, 0]
        at, line = first[live] + step, lines[live]
        own, mine = states[live], Tokens(*(value[at] for value in tokens))
        answer, u, decay = advance(own, mine, params)
        states[live], out[at] = own.to(pool.dtype).float(), answer.to(mixed.dtype)
        updates[line, step], keys[line, step], decays[line, step] = u, mine.k, decay.view(-1, *decays.shape[2:])
    write_slots(pool, torch.where(drafting, -1, index.dst), states)
    return out


def recurrence_fold(pool: Tensor, index: VerifyIndex, records: Sequence[Tensor]) -> None:
    """The states after the pending tokens, and at the marks."""
    write_slots(pool, index.dst, _folded(pool, index, records))


def _folded(pool: Tensor, index: VerifyIndex, records: Sequence[Tensor]) -> Tensor:
    """The states `[B, HV, V, K]` fp32 after the pending tokens; stores those at the marks."""
    states, (updates, keys, decays) = read_slots(pool, index.src).float(), records
    group = updates.shape[2] // keys.shape[2]
    for step in range(int(index.pending.max())):
        live = torch.nonzero(index.pending > step)[:, 0]
        line, own = index.read[live].long(), states[live]
        key = keys[line, step].repeat_interleave(group, dim=1)
        fold(own, updates[line, step], key, decays[line, step].view(*own.shape[:2], -1))
        states[live] = own.to(pool.dtype).float()
        marks = torch.where(index.mark[live] == step + 1, index.mark_dst[live], -1)
        write_slots(pool, marks, own)
    return states
