"""Rows whose states are written every few tokens, in torch: see RecordIndex."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.metadata import RecordIndex
from forkpoint.ops.parameters import Out, Records, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.reference import L2_EPS, Tokens, advance, fold, prepare
from forkpoint.ops.state_copy.reference import read_slots, write_slots


def recurrence_record(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Records,
    out: Out = None,
) -> Tensor:
    """See `table.RecurrenceRecord`. The states are taken on by all that is recorded; kernels read instead of the state
    before a token, with `c` the sum of g since the slot's state S, `e^c S x + sum_i e^{c - c_i} (k_i . x) u_i`."""
    states, (updates, *kept) = _taken_on(pool, index, records), records
    tokens, spec, mixed = prepare(inputs, params), params.spec, inputs.mixed
    size = spec.num_k_heads * spec.key_dim
    keys = mixed[:, size : 2 * size].view(-1, spec.num_k_heads, spec.key_dim)
    lengths = keys.float().square().sum(-1)
    left = (keys, torch.rsqrt(lengths + L2_EPS) if spec.delta else torch.ones_like(lengths), tokens.g)
    first, lens = index.cu_tokens[:-1].long(), index.cu_tokens.diff()
    found = mixed.new_zeros(mixed.shape[0], spec.num_v_heads, spec.value_dim)
    for step in range(int(lens.max())):
        live = torch.nonzero(lens > step)[:, 0]
        at, line, own = first[live] + step, index.line[live].long(), states[live]
        answer, u, _ = advance(own, Tokens(*(value[at] for value in tokens)), params)
        states[live], found[at] = own, answer.to(mixed.dtype)
        place = (index.written + index.held)[live].long() + step
        updates[line, place % updates.shape[1]] = u
        for record, value in zip(kept, left, strict=True):
            record[line, place % record.shape[1]] = value[at].to(record.dtype)
    return found if out is None else out.copy_(found)


def recurrence_settle(pool: Tensor, index: RecordIndex, records: Records) -> None:
    """What recurrence_record does before the tokens."""
    _taken_on(pool, index, records)


def _taken_on(pool: Tensor, index: RecordIndex, records: Records) -> Tensor:
    """The states `[B, HV, V, K]` fp32 after all that is recorded; writes those that are due."""
    states, (updates, keys, scales, decays) = read_slots(pool, index.src).float(), records
    group, held = updates.shape[2] // keys.shape[2], index.held
    due = (index.written + held) // index.interval * index.interval - index.written
    write_slots(pool, torch.where((due <= 0) & (index.src != index.dst), index.dst, -1), states)
    for i in range(int(held.max())):
        live = torch.nonzero(held > i)[:, 0]
        line, place, own = index.line[live].long(), index.written[live].long() + i, states[live]
        ring = place % keys.shape[1]
        key = (keys[line, ring].float() * scales[line, ring].unsqueeze(-1)).repeat_interleave(group, dim=1)
        fold(own, updates[line, place % updates.shape[1]], key, decays[line, ring].exp().unsqueeze(-1))
        states[live] = own
        for count, slot in ((index.mark, index.mark_dst), (due, index.dst)):
            write_slots(pool, torch.where(count[live] == i + 1, slot[live], -1), own)
    return states
