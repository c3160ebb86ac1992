"""Plans by hand, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from forkpoint.sched.plan import LAST_SAMPLED, IntArray, StateFlush, StepPlan, StepRows


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
    written: int | None = None  # None: all tokens before `start`
    pending: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def decode(row: int, start: int, read_slot: int, write_slot: int, token: int = LAST_SAMPLED, block: int = -1) -> Row:
    """The next token of a row that decodes."""
    return Row(row, start, [token], read_slot, write_slot, [block] if block >= 0 else (), decodes=True)


@dataclass
class Lags:
    """How far the states of decoding rows lag, for plans made by hand. Spaced ones are written at multiples of
    `interval`."""

    interval: int = 1
    _first: dict[int, int] = field(default_factory=dict)  # row -> start of its first decode step
    _last: dict[int, Row] = field(default_factory=dict)  # row -> its last decode step, without rejected drafts

    def of(self, row: Row) -> Row:
        """The row's next step, with what the state lacks."""
        if not row.decodes:
            return row
        first, last = self._first.setdefault(row.row, row.start), self._last.get(row.row)
        written, pending = row.start, 0
        if last is not None:
            pending = len(last.tokens) if last.num_drafts else 0
            if self.interval > 1:
                written = max(first, last.start // self.interval * self.interval)
        self._last[row.row] = row
        return replace(row, written=written, pending=pending)

    def reject(self, row: int, count: int) -> None:
        """The row's last step had so many wrong drafts."""
        last = self._last[row]
        self._last[row] = replace(last, tokens=last.tokens[: len(last.tokens) - count])

    def leave(self, row: int, slot: int) -> StateFlush:
        """The row leaves a state in `slot` that another one resumes from."""
        last = self._last[row]
        whole = self.of(Row(row, last.end, [LAST_SAMPLED], slot, slot, decodes=True))
        del self._first[row], self._last[row]
        assert whole.written is not None
        return StateFlush(row, slot, last.end, whole.written, whole.pending)


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
        row=column([row.row for row in rows]),
        start=column([row.start for row in rows]),
        num_tokens=column(lens),
        num_drafts=column([row.num_drafts for row in rows]),
        read_slot=column([row.read_slot for row in rows]),
        write_slot=column([row.write_slot for row in rows]),
        written=column([row.start if row.written is None else row.written for row in rows]),
        pending=column([row.pending for row in rows]),
        samples=np.asarray([row.samples for row in rows], np.bool_),
        tokens=ragged([row.tokens for row in rows])[1],
        block_ptr=block_ptr,
        new_blocks=blocks,
        save_ptr=save_ptr,
        save_positions=positions,
        save_slots=ragged([[slot for _, slot in row.saves] for row in rows])[1],
        optimistic=np.asarray([row.optimistic for row in rows], np.bool_),
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
