"""Columns of a step that depend on results which only the device has when the step starts.

With `async_scheduling` a step is issued before the previous step's sampled ids and accepted drafts reach the host. The
plan assumes that every draft is accepted. `num_rejected` counts, for each row, the drafts in flight that were rejected.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from forkpoint.json_options import MAX_DRAFTS

NOT_FINITE = -1  # stands in place of a token id whose logits were not finite


class IdColumns(NamedTuple):
    """The first `N` token ids of a step, of which some are known only on the device.

    The id is a draft from the device where `draft_at` names one; otherwise the row's last sampled id where `ids` is
    negative; otherwise `ids`.
    """

    ids: Tensor  # [>= N] int64, corrected in place
    rows: Tensor  # [N] int64, indexes last_sampled
    last_sampled: Tensor  # int64
    drafted: Tensor | None = None  # [rows, most] int64
    draft_at: Tensor | None = None  # [N] int64, indexes flattened `drafted`; -1: not a draft from the device


class OptimisticColumns(NamedTuple):
    """Positions, lengths, places of keys and record counts that are too large by the rejected drafts.

    `catch_up` corrects them in place. Token columns are `[.., N]`, flattened. Column n is too large by
    `num_rejected[rejected_at[n]]`, the record counts of row b, of `B <= N` rows, by
    `num_rejected[rejected_at_records[b]]`.
    """

    num_rejected: Tensor  # int64
    rejected_at: Tensor  # [N] int64
    positions: Tensor  # [.., N] int64
    kv_lens: Tensor  # [.., N] int32
    key_places: Tensor | None  # [.., N] int64, looked up in `table` for the corrected positions; -1 stays -1
    table_rows: Tensor  # [N] int32
    table: Tensor  # [lines, blocks] int32, blocks of block_size tokens
    block_size: int
    rejected_at_records: Tensor  # [B] int64
    pending: Tensor  # [B]
    held: Tensor | None = None  # [B]


class SpanColumns(NamedTuple):
    """The sampled positions of a step with drafts, row after row (`runtime.draft_spans`).

    The operator `accept` writes each row's last id to `last_sampled`, and its rejected drafts to `num_rejected`.
    """

    drafts: Tensor  # [P] int64: the draft that follows each position; a row's last position has none
    rows: Tensor  # [R] int64, indexes last_sampled and num_rejected
    starts: Tensor  # [R] int64
    sizes: Tensor  # [R] int64
    last_sampled: Tensor  # int64
    num_rejected: Tensor  # int64
    drafted: Tensor | None = None  # [rows, most] int64
    draft_at: Tensor | None = None  # [P] int64, indexes flattened `drafted`; -1: the draft is in `drafts`
    most: int = 1 + MAX_DRAFTS  # upper bound of `sizes`
