"""Plans by hand, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.sched.plan import LAST_SAMPLED, IntArray, StepPlan, StepRows


@dataclass(frozen=True)
class Row:
    """One row of a plan, as in StepRows; `saves` are (position, slot). `decodes`: through the decode kernels."""

    row: int
    start: int
    tokens: Sequence[int] | IntArray
    read_slot: int
    write_slot: int
    new_blocks: Sequence[int] | IntArray = ()
    saves: Sequence[tuple[int, int]] = ()
    samples: bool = True
    num_drafts: int = 0
    decodes: bool = False
    optimistic: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def decode(row: int, start: int, read_slot: int, write_slot: int, token: int = LAST_SAMPLED, block: int = -1) -> Row:
    """The next token of a row that decodes."""
    return Row(row, start, [token], read_slot, write_slot, [block] if block >= 0 else (), decodes=True)


def plan_of(step: int, rows: Sequence[Row], **changes: object) -> StepPlan:
    """The decoding rows come first, each kind in the order given."""
    rows = sorted(rows, key=lambda row: not row.decodes)

    def column(values: Sequence[int], dtype: type = np.int32) -> IntArray:
        return np.asarray(values, dtype)

    def ragged(parts: Sequence[Sequence[int] | IntArray]) -> tuple[IntArray, IntArray]:
        pointers = np.zeros(len(parts) + 1, np.int32)
        np.cumsum([len(part) for part in parts], out=pointers[1:])
        return pointers, np.concatenate([np.empty(0, np.int32), *(np.asarray(p, np.int32) for p in parts)])

    lens = [len(row.tokens) for row in rows]
    block_ptr, blocks = ragged([row.new_blocks for row in rows])
    save_ptr, positions = ragged([[position for position, _ in row.saves] for row in rows])
    table = StepRows(
        column([row.row for row in rows]),
        column([row.start for row in rows]),
        column(lens),
        column([row.num_drafts for row in rows]),
        column([row.read_slot for row in rows]),
        column([row.write_slot for row in rows]),
        np.asarray([row.samples for row in rows], np.bool_),
        ragged([row.tokens for row in rows])[1],
        block_ptr,
        blocks,
        save_ptr,
        positions,
        ragged([[slot for _, slot in row.saves] for row in rows])[1],
        np.asarray([row.optimistic for row in rows], np.bool_),
    )
    num_decodes = sum(row.decodes for row in rows)
    sampled = column([row.row for row in rows if row.samples])
    return StepPlan(
        step,
        rows=table,
        num_decodes=num_decodes,
        num_tokens=sum(lens),
        sampled_rows=sampled,
        **changes,  # type: ignore[arg-type]
    )
