"""Recurrence steps whose tokens leave records, in torch.

VerifyIndex describes rows with drafts. RecordIndex describes rows whose states are written every few tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.metadata import RecordIndex, VerifyIndex
from forkpoint.ops.parameters import Out, Records, RecurrenceInputs, RecurrenceParams, into
from forkpoint.ops.recurrence.reference import L2_EPS, Tokens, advance, fold, prepare
from forkpoint.ops.state_copy.reference import folded, read_slots, turns, verified, write_slots


def recurrence_verify(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    pool: Tensor,
    index: VerifyIndex,
    records: Records,
    out: Out = None,
) -> Tensor:
    """Compute the rows' tokens; return `[T, HV, V]`. `index` says which slots of `pool[P, HV, V, K]` and which records
    are read and written."""
    tokens, spec, (updates, keys, decays) = prepare(inputs, params), params.spec, records
    mixed = inputs.mixed
    found = mixed.new_empty(mixed.shape[0], spec.num_v_heads, spec.value_dim)

    def take(own: Tensor, at: Tensor, rows: Tensor, i: int) -> Tensor:
        line = index.write[rows].long()
        mine = Tokens(*(value[at] for value in tokens))
        answer, u, decay = advance(own, mine, params)
        found[at] = answer.to(mixed.dtype)
        updates[line, i], keys[line, i], decays[line, i] = u, mine.k, decay.view(-1, *decays.shape[2:])
        return own

    verified(_folded(pool, index, records), pool, index, take)
    return into(out, found)


def recurrence_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """Fold the pending tokens' records into the states, and store the states at the marks."""
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


def recurrence_record(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Records,
    out: Out = None,
) -> Tensor:
    """Compute the tokens of rows whose states are written every few tokens (`table.Recorded`).

    Folds all records before the tokens, and leaves a record of each token. Kernels compute the same without folding: a
    product of the state before a token with x is `e^c S x + sum_i e^{c - c_i} (k_i . x) u_i`, where S is the slot's
    state and c the sum of g since S.
    """
    states, (updates, *kept) = _taken_on(pool, index, records), records
    tokens, spec, mixed = prepare(inputs, params), params.spec, inputs.mixed
    size = spec.num_k_heads * spec.key_dim
    keys = mixed[:, size : 2 * size].view(-1, spec.num_k_heads, spec.key_dim)
    lengths = keys.float().square().sum(-1)
    left = (keys, torch.rsqrt(lengths + L2_EPS) if spec.delta else torch.ones_like(lengths), tokens.g)
    first, found = index.cu_tokens[:-1].long(), mixed.new_zeros(mixed.shape[0], spec.num_v_heads, spec.value_dim)
    for step, live in turns(index.cu_tokens.diff()):
        at, line, own = first[live] + step, index.line[live].long(), states[live]
        answer, u, _ = advance(own, Tokens(*(value[at] for value in tokens)), params)
        states[live], found[at] = own, answer.to(mixed.dtype)
        place = (index.written + index.held)[live].long() + step
        updates[line, place % updates.shape[1]] = u
        for record, value in zip(kept, left, strict=True):
            record[line, place % record.shape[1]] = value[at].to(record.dtype)
    return into(out, found)


def recurrence_flush(pool: Tensor, index: RecordIndex, records: Records) -> None:
    """Fold the records that are due into the states, as recurrence_record does before its tokens."""
    _taken_on(pool, index, records)


def _taken_on(pool: Tensor, index: RecordIndex, records: Records) -> Tensor:
    """Return the states `[B, HV, V, K]` fp32 after all records, and write those that are due to their slots."""
    states, (updates, keys, scales, decays) = read_slots(pool, index.src).float(), records
    group, held = updates.shape[2] // keys.shape[2], index.held
    due = (index.written + held) // index.interval * index.interval - index.written
    write_slots(pool, torch.where((due <= 0) & (index.src != index.dst), index.dst, -1), states)
    for i, live in turns(held):
        line, place, own = index.line[live].long(), index.written[live].long() + i, states[live]
        ring = place % keys.shape[1]
        key = (keys[line, ring].float() * scales[line, ring].unsqueeze(-1)).repeat_interleave(group, dim=1)
        fold(own, updates[line, place % updates.shape[1]], key, decays[line, ring].exp().unsqueeze(-1))
        states[live] = own
        for count, slot in ((index.mark, index.mark_dst), (due, index.dst)):
            write_slots(pool, torch.where(count[live] == i + 1, slot[live], -1), own)
    return states
