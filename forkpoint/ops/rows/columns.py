"""What only the device knows of a step's rows when it begins, and what has to be put right by it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from forkpoint.config import MAX_DRAFTS

NOT_FINITE = -1  # in place of a token id: the logits were not


class IdColumns(NamedTuple):
    """The first `N` ids of a step: a draft of the device's own, else what the row sampled last where `ids` has less
    than 0."""

    ids: Tensor  # [>= N] int64, put right in place
    rows: Tensor  # [N] int64, into last_sampled
    last_sampled: Tensor  # int64
    drafted: Tensor | None = None  # [rows, most] int64
    draft_at: Tensor | None = None  # [N] int64, into drafted end to end; -1: not a draft of the device's


class LateColumns(NamedTuple):
    """Of `N` rows of tokens, `[.., N]` end to end, how far they are behind what was planned: `missed[late[n]]`. Put
    right in place are positions, kv_lens and slots, and the records of `B <= N` rows, `missed[records_late[b]]` behind.
    """

    missed: Tensor  # int64
    late: Tensor  # [N] int64
    positions: Tensor  # [.., N] int64
    kv_lens: Tensor  # [.., N] int32
    slots: Tensor | None  # [.., N] int64: those of the positions, by table; -1 stays
    table_rows: Tensor  # [N] int32
    table: Tensor  # [lines, blocks] int32, of block_size tokens
    block_size: int
    records_late: Tensor  # [B] int64
    pending: Tensor  # [B]
    held: Tensor | None = None  # [B]


class WindowColumns(NamedTuple):
    """The positions that a step with drafts samples, row after row (`runtime.windows`), and what is brought up to date
    by which of them count."""

    drafts: Tensor  # [P] int64: the id that is to follow each; none is behind a row's last
    rows: Tensor  # [R] int64, into last_sampled and missed
    starts: Tensor  # [R] int64
    sizes: Tensor  # [R] int64
    last_sampled: Tensor  # int64
    missed: Tensor  # int64
    drafted: Tensor | None = None  # [rows, most] int64
    draft_at: Tensor | None = None  # [P] int64, into drafted end to end; -1: `drafts` has it
    most: int = 1 + MAX_DRAFTS  # no size is larger
