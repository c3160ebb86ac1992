"""The duration of steps, of which several may be in flight."""

from __future__ import annotations

from collections.abc import Callable


class StepClock:
    """Measures how long the device worked on each step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._issued_s: dict[int, float] = {}  # by step
        self._ended_s = 0.0  # of the last step

    def begin(self, step: int) -> None:
        """Note that a step was planned."""
        self._issued_s[step] = self._clock()

    def end(self, step: int) -> float:
        """Return the seconds of a step that has ended.

        It began when it was planned and the step before had ended. Steps may end that were not noted.
        """
        began_s, self._ended_s = max(self._ended_s, self._issued_s.get(step, 0.0)), self._clock()
        self._issued_s = {other: issued_s for other, issued_s in self._issued_s.items() if other > step}
        return self._ended_s - began_s
