"""The time of steps that compute prompts, for the choice between loading a prefix and computing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from forkpoint.cache.load_choice import LoadChoice
from forkpoint.sched.plan import StepPlan

LEAST_TOKENS: Final = 1024  # prompt tokens of a step; the time of a step with fewer says little about the rate


def note_prefill(plan: StepPlan, seconds: float, choices: Sequence[LoadChoice]) -> None:
    """Report to the choices of all tiers how long a step took, if it has many prompt tokens."""
    lens = plan.rows.num_tokens[plan.num_decodes :]
    num_tokens = int(lens.sum())
    if num_tokens < LEAST_TOKENS:
        return
    start = plan.rows.start[plan.num_decodes :].astype(np.int64)
    num_pairs = float((lens * (2 * start + lens)).sum() / 2)
    for choice in choices:
        choice.note_step(num_tokens, num_pairs, seconds)
