"""When Python's cycle collector runs: while a step is on its way, not while one is planned."""

from __future__ import annotations

import gc

MIDDLE_EVERY = 64  # steps between collections of the middle generation
FULL_EVERY = 8192  # and of everything; there are few cycles to find


class GarbageCollector:
    """Collects a little after each submitted step.

    Left to itself Python collects when enough new objects have piled up, which takes milliseconds and falls
    into planning as likely as not; after each step there are only a few hundred to look at.
    """

    def __init__(self) -> None:
        self._num_steps = 0

    def after_submit(self) -> None:
        """A step was submitted; the host has time."""
        self._num_steps += 1
        if self._num_steps % FULL_EVERY == 0:
            gc.collect(2)
        else:
            gc.collect(1 if self._num_steps % MIDDLE_EVERY == 0 else 0)
