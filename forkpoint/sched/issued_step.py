"""A step in flight, and what its result says of its requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forkpoint.cache.tree import Checkpoint, Entry
from forkpoint.sched.plan import StepPlan, StepResult
from forkpoint.sched.request import RequestUpdate
from forkpoint.sched.scheduled_request import ScheduledRequest


@dataclass(slots=True, eq=False)
class IssuedStep:
    """A step in flight: what to do when its result arrives, or to undo when it fails.

    `requests` are those of the plan's rows, `sampled` those whose rows sample. `readers` are the checkpoints that its
    rows read. `filed` entered the tree since the plan before: this plan, or an earlier one, computes it. The scheduler
    sets `planned_s`, the time at which it was planned.
    """

    plan: StepPlan
    requests: list[ScheduledRequest]
    sampled: list[ScheduledRequest]
    readers: list[Checkpoint]
    filed: list[Entry]
    planned_s: float = 0.0

    def confirm_tokens(self, result: StepResult) -> tuple[list[ScheduledRequest], list[int]]:
        """Confirm the tokens of rows that were not sampled. Take rejected drafts off the planned tokens of the others.

        Returns, for each sampled token, its request and how many of the request's tokens are confirmed with it.
        """
        rows, requests, sampled = self.plan.rows, self.requests, self.sampled
        ends = rows.start + rows.num_tokens
        if len(sampled) < len(requests):
            for i in np.flatnonzero(~rows.samples).tolist():
                requests[i].lease.confirm(int(ends[i]))
        for i in np.flatnonzero(rows.optimistic).tolist():
            ends[i] = requests[i].lease.num_confirmed + rows.num_tokens[i]
        ends, counts = ends[rows.samples], result.counts
        if counts is None:
            return sampled, ends.tolist()
        rejected = 1 + rows.num_drafts[rows.samples] - counts
        for scheduled, num_rejected in zip(sampled, rejected.tolist(), strict=True):
            if num_rejected:
                scheduled.lease.reject(num_rejected, in_last_step=scheduled.last_step == result.step)
        confirmed = [each for each, count in zip(sampled, counts.tolist(), strict=True) for _ in range(count)]
        return confirmed, np.repeat(ends - rejected, counts).tolist()

    def take_prompt_logprobs(self, result: StepResult) -> list[RequestUpdate]:
        """Return updates with the log-probabilities of prompt tokens, for the requests that want them.

        A request whose last prompt token is among them wants no more.
        """
        updates = []
        for scheduled in self.requests:
            request, found = scheduled.request, result.prompt_logprobs.get(scheduled.row)
            if found is None or scheduled.ended or not request.wants_prompt_logprobs:
                continue
            request.prompt_logprobs_done = found[-1][0] == request.num_prompt_tokens - 1
            updates.append(RequestUpdate(request, prompt_logprobs=found))
        return updates
