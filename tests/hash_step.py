"""A step of the hash runner, and how it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forkpoint.sched.plan import StepResult


class PlanViolation(AssertionError):
    """A plan broke a rule, or read a block or slot that does not hold its row's tokens."""


def require(ok: bool, step: int | None, message: str) -> None:
    """Raises PlanViolation."""
    if not ok:
        raise PlanViolation(message if step is None else f"step {step} {message}")


class InjectedFailure(RuntimeError):
    """The failure that a test asked for with `fail_steps`."""


@dataclass(slots=True)
class AnsweredStep:
    """A step under way; `on_seen` is called when its failure is told."""

    value: StepResult | None
    error: Exception | None
    on_seen: Callable[[], None]

    def result(self) -> StepResult:
        if self.error is not None:
            self.on_seen()
            raise self.error
        assert self.value is not None
        return self.value
