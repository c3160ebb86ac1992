"""How many prompt tokens a step may compute next to rows that decode, from the durations of earlier steps."""

from __future__ import annotations

from typing import Final

from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.step_line import StepLine

MARGIN: Final = 0.8  # share of the limit that steps are planned for, because durations vary
MEMORY: Final = 0.9  # factor on the weight of earlier steps for each new step
FIRST_TOKENS: Final = 512  # prompt tokens of a step before any prompt was timed


class StepPace:
    """Limits prompt tokens by the time of a step, from a line through the seconds of steps over their prompt tokens."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s` is the longest that a step with decode rows should take."""
        self._limit_s = MARGIN * limit_s
        self._line = StepLine(MEMORY)

    def add(self, num_prompt_tokens: int, seconds: float) -> None:
        """Take in the duration of a step that computed this many prompt tokens, or only decode rows."""
        self._line.add(num_prompt_tokens, seconds)

    @property
    def num_tokens(self) -> int:
        """The prompt tokens that the next step may compute next to decode rows, at least a block of them."""
        line, slope = self._line, self._line.slope
        if line.num_tokens:
            # With a steeper slope, steps without prompts would take less than no time. Such a slope, of a step that was
            # held up, would allow only a block a step. Steps of a block each would then never change the slope.
            steepest = line.seconds / line.num_tokens
            slope = min(slope or steepest, steepest)
        if not slope:
            return FIRST_TOKENS
        seconds_left = self._limit_s - line.seconds / line.weight
        return max(BLOCK_SIZE, int(line.num_tokens / line.weight + seconds_left / slope))
