"""A line through the durations of steps over their tokens."""

from __future__ import annotations

import math
from typing import Final

LEAST_SPREAD: Final = 0.05  # relative deviation of the steps' tokens that is enough to fit the slope


class StepLine:
    """Fits a line to the seconds of steps over their tokens. Newer steps weigh more.

    While all steps have about as many tokens, which says nothing about the slope, the last slope is kept for `stale`
    steps. Others read the `slope`, None while it is unknown, and the weighted sums `weight`, `num_tokens`, `seconds`.
    """

    def __init__(self, memory: float, stale: float = math.inf) -> None:
        """`memory` is the factor on the weight of earlier steps for each new step."""
        self._memory, self._stale, self._age = memory, stale, 0
        self.weight = self.num_tokens = self.seconds = self._xx = self._xy = 0.0
        self.slope: float | None = None

    def add(self, num_tokens: float, seconds: float) -> None:
        memory = self._memory
        self.weight = memory * self.weight + 1.0
        self.num_tokens = memory * self.num_tokens + num_tokens
        self.seconds = memory * self.seconds + seconds
        self._xx = memory * self._xx + num_tokens**2
        self._xy = memory * self._xy + num_tokens * seconds
        spread = self.weight * self._xx - self.num_tokens**2
        self._age += 1
        if spread > (LEAST_SPREAD * self.num_tokens) ** 2:
            covariance = self.weight * self._xy - self.num_tokens * self.seconds
            self.slope, self._age = max(0.0, covariance / spread), 0
        elif self._age > self._stale:
            self.slope = None
