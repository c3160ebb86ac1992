"""What only the device knows of a step's rows when it begins, and what has to be put right by it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NOT_FINITE = -1  # in place of a token id: the logits were not


@dataclass(frozen=True, slots=True)
class IdColumns:
    """The first `N` ids of a step: a draft of the device's own, else what the row sampled last where `ids` has less
    than 0."""

    ids: Tensor  # [>= N] int64, put right in place
    rows: Tensor  # [N] int64, into last_sampled
    last_sampled: Tensor  # int64
    drafted: Tensor | None = None  # [rows, most] int64
    draft_at: Tensor | None = None  # [N] int64, into drafted end to end; -1: not a draft of the device's


@dataclass(frozen=True, slots=True)
class LateColumns:
    """Of `N` rows of tokens, `[.., N]` end to end, how far they are behind what was planned, `missed[late[n]]`. All
    others but `table` are put right in place."""

    missed: Tensor  # int64
    late: Tensor  # [N] int64
    positions: Tensor  # [.., N] int64
    kv_lens: Tensor  # [.., N] int32
    slots: Tensor | None  # [.., N] int64: those of the positions, by table; -1 stays
    table_rows: Tensor  # [N] int32
    table: Tensor  # [lines, blocks] int32, of block_size tokens
    block_size: int
    records_late: Tensor  # [B] int64, B <= N: as `late` for
    records: tuple[Tensor, ...]  # [B] numbers of records
    ahead: int = 0  # slots are those of so many tokens later


@dataclass(frozen=True, slots=True)
class WindowColumns:
    """The positions that a step with drafts samples, row after row; see `runtime.windows`."""

    drafts: Tensor  # [P] int64: the id that is to follow each; none is behind a row's last
    rows: Tensor  # [R] int64, into last_sampled and missed
    starts: Tensor  # [R] int64
    sizes: Tensor  # [R] int64, at most `most`
    most: int
    draft_at: Tensor | None = None  # [P] int64, into drafted end to end; -1: `drafts` has it
