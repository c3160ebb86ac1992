"""Preempts running requests early and late in their answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from evaluation.subject import Subject
from forkpoint.sched.plan import StepPlan
from forkpoint.sched.scheduler import Scheduler

LATEST_OUTPUT = 2  # outputs after which a request is preempted at the latest
PAUSE = 2  # more outputs after which it is preempted once more


class PreemptingPlanner:
    """A scheduler that preempts every request twice.

    The first time is after it has computed something, or after one or two output tokens, drawn from `seed`. The second
    time is `PAUSE` tokens later. Everything else is the scheduler's own.
    """

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self._scheduler = scheduler
        self._random = random.Random(seed)
        self._moments: dict[str, list[int]] = {}  # outputs at which a request is still to be preempted, last first

    def schedule(self) -> StepPlan | None:
        for entry in list(self._scheduler._running.requests):
            request = entry.request
            if request.id not in self._moments:
                first = self._random.randint(0, LATEST_OUTPUT)
                self._moments[request.id] = [first + PAUSE, first]
            moments = self._moments[request.id]
            if moments and entry.lease.num_planned and len(request.output_token_ids) >= moments[-1]:
                moments.pop()
                self._scheduler._departures.preempt(entry)
        return self._scheduler.schedule()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


@contextmanager
def preempting(subject: Subject, seed: int) -> Iterator[None]:
    """Preempt every request of the subject at least once while the context is open, unless its answer ends before."""
    core, scheduler = subject.core, subject.scheduler
    core.scheduler = cast(Scheduler, PreemptingPlanner(scheduler, seed))
    try:
        yield
    finally:
        core.scheduler = scheduler
