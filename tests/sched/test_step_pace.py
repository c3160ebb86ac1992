"""The limit on prompt tokens next to decode rows finds back to what it was after something held a step up."""

from __future__ import annotations

import pytest

from forkpoint.sched.step_pace import StepPace

LIMIT_S, BASE_S = 0.05, 0.01


class Steps:
    """Steps that each compute as many prompt tokens as the pace allows, next to one decode row."""

    def __init__(self, token_s: float) -> None:
        self.pace = StepPace(LIMIT_S)
        self._token_s = token_s

    def run(self, count: int, held_up_s: float = 0.0) -> int:
        """Return the tokens that the next step may compute."""
        for _ in range(count):
            tokens = self.pace.num_tokens
            self.pace.add(tokens, BASE_S + self._token_s * tokens + held_up_s)
        return self.pace.num_tokens


@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 2e-4])
@pytest.mark.parametrize("held_up_s", [0.3, 25.0])
@pytest.mark.parametrize("at", [0, 3, 200])
def test_a_step_that_was_held_up_is_forgotten(token_s: float, held_up_s: float, at: int) -> None:
    usual = Steps(token_s).run(200)
    assert usual == pytest.approx((0.8 * LIMIT_S - BASE_S) / token_s, rel=0.05)
    steps = Steps(token_s)
    steps.run(at)
    steps.run(1, held_up_s)
    assert steps.run(150) == pytest.approx(usual, rel=0.05)
