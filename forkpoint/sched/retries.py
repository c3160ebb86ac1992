"""Requests of failed steps: each runs alone until it has passed the point of failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from forkpoint.sched.scheduled_request import ScheduledRequest


class Retries:
    """The requests that may have made a step fail, in the order in which they are tried.

    A step with several requests failed. Each of them is planned in steps of its own until it has computed as many
    tokens as the failed step would have taken it to. If its step fails again, the fault is its own.
    """

    def __init__(self) -> None:
        self._suspects: deque[ScheduledRequest] = deque()

    def add(self, requests: Iterable[ScheduledRequest]) -> None:
        """Try these requests alone from now on, each up to the tokens that are planned now. They join the others."""
        fresh = list(requests)
        for scheduled in fresh:
            scheduled.suspect_until = scheduled.lease.num_planned
        self._suspects = deque(sorted({*self._suspects, *fresh}, key=lambda each: each.order))

    def next(self) -> ScheduledRequest | None:
        """Return the request to plan alone, after dropping suspects that ended or passed their point of failure.

        Returns None if no suspect is left.
        """
        while self._suspects:
            scheduled = self._suspects[0]
            if not scheduled.ended and scheduled.lease.num_planned < scheduled.suspect_until:
                return scheduled
            self._suspects.popleft()
        return None
