"""How far states lag behind their rows, as a runner with records leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.plan import NO_SLOT, Move, MoveKind, MoveRoute, StepPlan
from tests.hash_rows import HashWork
from tests.hash_step import require

LEAVES_ARENA = (MoveRoute.STORE, MoveRoute.ARENA_TO_DISK, MoveRoute.OFFER)
COMES_TO_ARENA = (MoveRoute.LOAD, MoveRoute.LAND, MoveRoute.FETCHED)


@dataclass(slots=True)
class Lag:
    """A decoding row's state. Spaced tensors have `written` of `end` tokens, others lack the last `pending` ones."""

    slot: int
    end: int
    written: int
    pending: int = 0

    @property
    def is_whole(self) -> bool:
        return self.written == self.end and not self.pending


@dataclass(slots=True)
class HashLags:
    """Checks what plans say of lags against the rule of the kernels: a step writes a spaced state at the last multiple
    of `interval` that its start has reached. A state that lags may not be read by others."""

    interval: int = 1
    num_flushes: int = 0
    _rows: dict[int, Lag] = field(default_factory=dict)
    _incomplete: set[int] = field(default_factory=set)  # slots

    def remove(self, plan: StepPlan) -> None:
        """Rows leave, before any move. A flush completes the state of a row."""
        for flush in plan.flushes:
            require(flush.row in plan.removed, plan.step, f"flushes row {flush.row}, which stays")
            lag = self._rows.get(flush.row)
            if lag is None:  # its last step failed
                continue
            want = lag.slot, lag.end, lag.written, lag.pending
            got = flush.slot, flush.num_tokens, flush.written, flush.pending
            require(got == want, plan.step, f"flushes row {flush.row} by {got}; it is {want}")
            lag.written, lag.pending = lag.end, 0
            self.num_flushes += 1
        for row in plan.removed:
            lag = self._rows.pop(row, None)
            if lag is not None and not lag.is_whole and lag.slot != NO_SLOT:
                self._incomplete.add(lag.slot)

    def move(self, step: int, move: Move, *, sound: bool) -> None:
        """Check what leaves the arena, if `sound`: after a step that failed nobody reads what a plan copies."""
        if move.kind is not MoveKind.SLOT:
            return
        if move.route is MoveRoute.ARENA:
            for lag in self._rows.values():
                if lag.slot == move.src:
                    lag.slot = move.dst
            lags = move.src in self._incomplete
            self._incomplete -= {move.src, move.dst}
            self._incomplete |= {move.dst} if lags else set()
        elif move.route in LEAVES_ARENA and sound:
            require(move.src not in self._incomplete, step, f"copies slot {move.src}, whose state was never completed")
            running = [row for row, lag in self._rows.items() if lag.slot == move.src and not lag.is_whole]
            require(not running, step, f"copies slot {move.src}, in which the state of row {running} lags")
        elif move.route in COMES_TO_ARENA:
            self._incomplete.discard(move.dst)

    def check(self, plan: StepPlan, works: Sequence[HashWork]) -> None:
        columns = plan.rows.written.tolist(), plan.rows.pending.tolist()
        for work, written, pending in zip(works, *columns, strict=True):
            lag = self._rows.get(work.row, Lag(work.read_slot, work.start, work.start))
            where = f"row {work.row} at {work.start}"
            if lag.slot != work.read_slot or work.row not in self._rows:
                known = work.read_slot not in self._incomplete
                require(known, plan.step, f"{where} reads slot {work.read_slot}, whose state was never completed")
            if self.interval > 1:
                require(written == lag.written, plan.step, f"{where} has {lag.written} tokens written, not {written}")
            left = pending - (work.latest - work.start)
            require(left == lag.pending, plan.step, f"{where} has {lag.pending} tokens pending, not {left}")

    def advance(self, plan: StepPlan, works: Sequence[HashWork], ends: Mapping[int, int]) -> None:
        """The step ran; `ends` has where rows with drafts came to."""
        for i, work in enumerate(works):
            self._incomplete -= {work.write_slot, *(slot for _, slot in work.saves)}
            if i >= plan.num_decodes:
                continue
            before = self._rows.get(work.row)
            end, written = ends.get(work.row, work.end), work.start
            if before is not None:
                reached = work.start // self.interval * self.interval
                written = max(before.written, reached)
                if work.read_slot != work.write_slot and work.start % BLOCK_SIZE and not before.is_whole:
                    self._incomplete.add(before.slot)
            pending = end - work.start if work.drafts else 0
            self._rows[work.row] = Lag(work.write_slot, end, end if self.interval == 1 else written, pending)

    def fail(self, works: Sequence[HashWork]) -> None:
        """Nobody knows what a step that failed has written."""
        for work in works:
            self._rows.pop(work.row, None)
