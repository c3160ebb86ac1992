"""The bookkeeping of a step's rows in torch, without waiting for the device. columns.py describes the arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.rows.columns import NOT_FINITE, IdColumns, OptimisticColumns, SpanColumns


def catch_up(ids: IdColumns, columns: OptimisticColumns | None = None) -> None:
    own = ids.ids[: len(ids.rows)]
    drafted = _drafted(own, ids.drafted, ids.draft_at)
    own.copy_(torch.where(drafted < 0, ids.last_sampled[ids.rows], drafted))
    if columns is None:
        return
    rejected = columns.num_rejected[columns.rejected_at]
    columns.positions.sub_(rejected)
    columns.kv_lens.sub_(rejected)
    if columns.key_places is not None:
        at, size = columns.positions, columns.block_size
        blocks = columns.table[columns.table_rows.long(), at // size].long()
        columns.key_places.copy_(torch.where(columns.key_places < 0, columns.key_places, blocks * size + at % size))
    rejected = columns.num_rejected[columns.rejected_at_records]
    for counts in (columns.pending, columns.held):
        if counts is not None:
            counts.sub_(rejected)


def newest(windows: Tensor, records: Tensor, slots: Tensor, lines: Tensor, pending: Tensor) -> Tensor:
    of_line = records[lines, (pending - 1).clamp(min=0)]
    return torch.where((pending > 0).unsqueeze(1), of_line, windows[slots])


def accept(token_ids: Tensor, finite: Tensor, columns: SpanColumns) -> Tensor:
    _, rows, starts, sizes, last_sampled, num_rejected, drafted, draft_at, most = columns
    answers = torch.where(finite, token_ids, NOT_FINITE)
    right = answers == _drafted(columns.drafts, drafted, draft_at)
    places = starts[:, None] + torch.arange(most, device=starts.device)
    counts = right[places.clamp(max=len(answers) - 1)].cumprod(1).sum(1) + 1
    last_sampled.index_copy_(0, rows, answers[starts + counts - 1].clamp(min=0))  # a row that is not finite has no id
    num_rejected.index_copy_(0, rows, sizes - counts)
    return torch.cat((answers, counts))


def _drafted(ids: Tensor, drafted: Tensor | None, at: Tensor | None) -> Tensor:
    """Return `ids`, but entry `at` of the flattened `drafted`, which only the device has, where `at` is not -1."""
    if drafted is None or at is None:
        return ids
    return torch.where(at < 0, ids, drafted.view(-1)[at.clamp(min=0)])
