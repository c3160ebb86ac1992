"""The disk of a simulated engine: how long its reads and writes take."""

from __future__ import annotations

from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.tier_entries import TierReport
from forkpoint.sched.plan import Move, MoveKind, MoveRoute

# Moves that cost a step nothing: the disk's own, and those without a copy.
NO_COPIES = frozenset({MoveRoute.DISK, MoveRoute.READ, MoveRoute.DISCARD, MoveRoute.REMOVE})
WRITES = frozenset({MoveRoute.ARENA_TO_DISK, MoveRoute.HOST_TO_DISK, MoveRoute.DISK})


class SimulatedDisk:
    """Reads and writes `rate` bytes a second, one entry after the other. Reads go before writes that wait."""

    def __init__(self, layout: CacheLayout, rate: float) -> None:
        self._layout = layout
        self._rate = rate
        self._read_until_s = 0.0
        self._written_until_s = 0.0
        self._due_s: dict[int, float] = {}  # by ticket

    def start(self, moves: tuple[Move, ...], now_s: float) -> None:
        """Start, at `now_s`, what the moves of a plan ask of the disk. Other moves are ignored."""
        for move in moves:
            size = self._layout.slot_bytes if move.kind is MoveKind.SLOT else self._layout.block_bytes
            if move.route is MoveRoute.READ:
                self._read_until_s = max(self._read_until_s, now_s) + size / self._rate
                self._due_s[move.ticket] = self._read_until_s
            elif move.route in WRITES:
                start_s = max(self._written_until_s, self._read_until_s, now_s)
                self._written_until_s = start_s + size / self._rate
                if move.ticket:
                    self._due_s[move.ticket] = self._written_until_s

    def next_s(self, now_s: float) -> float:
        """Return the time of the next report, `now_s` if there is one already."""
        return max(now_s, min(self._due_s.values(), default=now_s))

    def next_report(self, now_s: float) -> TierReport | None:
        """Return the tickets that were done by `now_s` and not reported before; None if there are none."""
        done = tuple(ticket for ticket, due_s in self._due_s.items() if due_s <= now_s)
        for ticket in done:
            del self._due_s[ticket]
        return TierReport(done) if done else None
