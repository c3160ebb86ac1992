"""The bookkeeping of a step's rows in torch, without waiting for the device. columns.py describes the arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.rows.columns import NOT_FINITE, IdColumns, LateColumns, WindowColumns


def catch_up(ids: IdColumns, late: LateColumns | None = None) -> None:
    own = ids.ids[: len(ids.rows)]
    drafted = _drafted(own, ids.drafted, ids.draft_at)
    own.copy_(torch.where(drafted < 0, ids.last_sampled[ids.rows], drafted))
    if late is None:
        return
    missed = late.missed[late.late]
    late.positions.sub_(missed)
    late.kv_lens.sub_(missed)
    if late.slots is not None:
        at, size = late.positions, late.block_size
        blocks = late.table[late.table_rows.long(), at // size].long()
        late.slots.copy_(torch.where(late.slots < 0, late.slots, blocks * size + at % size))
    behind = late.missed[late.records_late]
    for counts in (late.pending, late.held):
        if counts is not None:
            counts.sub_(behind)


def newest(windows: Tensor, records: Tensor, slots: Tensor, lines: Tensor, pending: Tensor) -> Tensor:
    of_line = records[lines, (pending - 1).clamp(min=0)]
    return torch.where((pending > 0).unsqueeze(1), of_line, windows[slots])


def accept(token_ids: Tensor, finite: Tensor, columns: WindowColumns) -> Tensor:
    _, rows, starts, sizes, last_sampled, missed, drafted, draft_at, most = columns
    answers = torch.where(finite, token_ids, NOT_FINITE)
    right = answers == _drafted(columns.drafts, drafted, draft_at)
    places = starts[:, None] + torch.arange(most, device=starts.device)
    counts = right[places.clamp(max=len(answers) - 1)].cumprod(1).sum(1) + 1
    last_sampled.index_copy_(0, rows, answers[starts + counts - 1].clamp(min=0))  # a row that is not finite has no id
    missed.index_copy_(0, rows, sizes - counts)
    return torch.cat((answers, counts))


def _drafted(ids: Tensor, drafted: Tensor | None, at: Tensor | None) -> Tensor:
    """Return `ids`, but entry `at` of the flattened `drafted`, which only the device has, where `at` is not -1."""
    if drafted is None or at is None:
        return ids
    return torch.where(at < 0, ids, drafted.view(-1)[at.clamp(min=0)])
