"""How long it takes until a conversation comes back, learnt from those that did."""

from __future__ import annotations

SHORTEST, LONGEST = 0.2, 2.0  # arenas of new data
STEP = 0.04  # one observation moves the estimate by this share, the first ones by more
NOTABLE = 1.2  # a change by so much is worth ordering all entries anew


class ReuseDistance:
    """A running median of the new data, in arenas, between the last use of an entry and its next one.

    Entries that gave way and were asked for again count as much as those that were still there; otherwise the
    estimate could never exceed what the arena happens to hold.
    """

    def __init__(self, start: float = 0.25) -> None:
        self._now = self._reported = start
        self._num_observed = 0

    @property
    def median(self) -> float:
        """As last reported, so that it stays put between notable changes."""
        return self._reported

    def observe(self, distance: float) -> bool:
        """One reuse. True if the median has changed notably."""
        self._num_observed += 1
        factor = 1 + max(STEP, 1 / self._num_observed)
        moved = self._now * factor if distance > self._now else self._now / factor
        self._now = min(max(moved, SHORTEST), LONGEST)
        if 1 / NOTABLE < self._now / self._reported < NOTABLE:
            return False
        self._reported = self._now
        return True
