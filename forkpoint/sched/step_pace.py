"""How many prompt tokens a step may compute next to rows that decode, from the durations of earlier steps."""

from __future__ import annotations

from typing import Final

from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.plan import StepPlan

MARGIN: Final = 0.8  # share of the limit that steps are planned for, because durations vary
MEMORY: Final = 0.9  # factor on the weight of earlier steps for each new step
APART: Final = 0.05  # relative deviation of the steps' tokens that is enough to fit the line's slope
FIRST_TOKENS: Final = 512  # before any prompt was timed


def tokens_within(limit_s: float, num_tokens: float, seconds: float, token_s: float) -> int:
    """Return how many prompt tokens a step of `limit_s` computes, but at least a block, so that prompts go on.

    A step with `num_tokens` takes `seconds`, and each further token takes `token_s`.
    """
    return max(BLOCK_SIZE, int(num_tokens + (limit_s - seconds) / token_s))


class StepPace:
    """Fits a line to the seconds of steps over their prompt tokens. Newer steps weigh more.

    While all steps have about as many prompt tokens, which says nothing about the slope, the last slope is kept.
    """

    def __init__(self, limit_s: float) -> None:
        """`limit_s` is the longest that a step with decode rows should take."""
        self._limit_s = MARGIN * limit_s
        self._sums = [0.0] * 5  # weighted sums of 1, x, y, xx and xy: x prompt tokens in y seconds
        self._slope = 0.0  # 0: not known yet

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Take in the duration of a step that has ended. Steps that only wait or copy are ignored."""
        if not plan.num_tokens:
            return
        tokens = float(plan.rows.num_tokens[plan.num_decodes :].sum())
        new = (1.0, tokens, seconds, tokens**2, tokens * seconds)
        self._sums = [MEMORY * before + value for before, value in zip(self._sums, new, strict=True)]
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x**2
        if spread > (APART * x) ** 2:
            self._slope = max(0.0, (weight * xy - x * y) / spread)

    @property
    def num_tokens(self) -> int:
        """The prompt tokens that the next step may compute next to decode rows."""
        weight, x, y, *_ = self._sums
        slope = self._slope
        if x:
            # No step takes less than no time without prompts. A slope kept from a step that something held up would
            # otherwise allow a block a step, and steps of a block each would keep it.
            slope = min(slope or y / x, y / x)
        if not slope:
            return FIRST_TOKENS
        return tokens_within(self._limit_s, x / weight, y / weight, slope)
