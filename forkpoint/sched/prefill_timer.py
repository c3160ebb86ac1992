"""The time of steps that compute prompts, for the choice between loading a prefix and computing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from forkpoint.cache.load_choice import LoadChoice
from forkpoint.sched.plan import StepPlan
from forkpoint.sched.step_clock import StepClock

LEAST_TOKENS: Final = 1024  # prompt tokens of a step; the time of a step with fewer says little about the rate


class PrefillTimer:
    """Reports steps with many prompt tokens to the choices of all tiers."""

    def __init__(self, choices: Sequence[LoadChoice], clock: Callable[[], float]) -> None:
        self._choices, self._clock = choices, StepClock(clock)

    def begin(self, plan: StepPlan) -> None:
        """Note that a step was planned."""
        self._clock.begin(plan.step)

    def end(self, plan: StepPlan) -> None:
        """Take in that a step has ended."""
        seconds = self._clock.end(plan.step)
        lens = plan.rows.num_tokens[plan.num_decodes :]
        num_tokens = int(lens.sum())
        if num_tokens >= LEAST_TOKENS:
            start = plan.rows.start[plan.num_decodes :].astype(np.int64)
            num_pairs = float((lens * (2 * start + lens)).sum() / 2)
            for choice in self._choices:
                choice.note_step(num_tokens, num_pairs, seconds)
