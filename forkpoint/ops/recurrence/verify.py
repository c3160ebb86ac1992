"""The recurrence of rows with drafts, in torch: see VerifyIndex."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forkpoint.ops.metadata import VerifyIndex
from forkpoint.ops.parameters import Records, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.reference import Tokens, advance, fold, prepare
from forkpoint.ops.state_copy.reference import read_slots, write_slots


def recurrence_verify(
    inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: VerifyIndex, records: Records
) -> Tensor:
    """Inputs of `T` tokens -> `[T, HV, V]`; reads and writes `pool[P, HV, V, K]` and the records
    as `index` says."""
    tokens, spec, (updates, keys, decays) = prepare(inputs, params), params.spec, records
    mixed = inputs.mixed
    out = mixed.new_empty(mixed.shape[0], spec.num_v_heads, spec.value_dim)

    def take(own: Tensor, at: Tensor, rows: Tensor, i: int) -> Tensor:
        line = index.write[rows].long()
        mine = Tokens(*(value[at] for value in tokens))
        answer, u, decay = advance(own, mine, params)
        out[at] = answer.to(mixed.dtype)
        updates[line, i], keys[line, i], decays[line, i] = u, mine.k, decay.view(-1, *decays.shape[2:])
        return own

    verified(_folded(pool, index, records), pool, index, take)
    return out


def recurrence_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """The states after the pending tokens, and at the marks."""
    write_slots(pool, index.dst, _folded(pool, index, records))


def _folded(pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    updates, keys, decays = records
    group = updates.shape[2] // keys.shape[2]

    def take(own: Tensor, rows: Tensor, i: int) -> Tensor:
        line = index.read[rows].long()
        key = keys[line, i].repeat_interleave(group, dim=1)
        fold(own, updates[line, i], key, decays[line, i].view(*own.shape[:2], -1))
        return own

    return folded(pool, index, take)


def folded(pool: Tensor, index: VerifyIndex, fold: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    """The states `[B, ...]` fp32 after the pending tokens; stores those at the marks. `fold(states, rows, i)` are
    states after record `i` of those rows."""
    states = read_slots(pool, index.src).float()
    for i in range(int(index.pending.max())):
        live = torch.nonzero(index.pending > i)[:, 0]
        own = fold(states[live], live, i)
        states[live] = own.to(pool.dtype).float()
        write_slots(pool, torch.where(index.mark[live] == i + 1, index.mark_dst[live], -1), own)
    return states


def verified(
    states: Tensor, pool: Tensor, index: VerifyIndex, advance: Callable[[Tensor, Tensor, Tensor, int], Tensor]
) -> None:
    """Takes folded states `[B, ...]` through all rows' first tokens, then the second ones of those that have two, and
    so on. `advance(states, tokens, rows, i)` are states after those tokens, which leave record `i` of their rows."""
    first, lens = index.cu_tokens[:-1].long(), index.cu_tokens.diff()
    drafting = lens > 1
    write_slots(pool, torch.where(drafting, index.dst, -1), states)
    for i in range(int(lens.max())):
        live = torch.nonzero(lens > i)[:, 0]
        own = advance(states[live], first[live] + i, live, i)
        states[live] = own.to(pool.dtype).float()
    write_slots(pool, torch.where(drafting, -1, index.dst), states)
