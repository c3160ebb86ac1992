"""What a step's result means for the requests of its rows."""

from __future__ import annotations

import numpy as np

from forkpoint.sched.plan import StepResult
from forkpoint.sched.request import RequestUpdate
from forkpoint.sched.scheduled_request import IssuedStep, ScheduledRequest


def confirm_tokens(issued: IssuedStep, result: StepResult) -> tuple[list[ScheduledRequest], list[int]]:
    """Confirm the tokens of rows that were not sampled, and take rejected drafts off the planned ones of the others.

    Returns, for each sampled token, its request and how many of the request's tokens are confirmed with it.
    """
    rows, requests, sampled = issued.plan.rows, issued.requests, issued.sampled
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


def take_prompt_logprobs(issued: IssuedStep, result: StepResult) -> list[RequestUpdate]:
    """Report the log-probabilities of prompt tokens to the requests that want them."""
    updates = []
    for scheduled in issued.requests:
        request, found = scheduled.request, result.prompt_logprobs.get(scheduled.row)
        if found is None or scheduled.ended or not request.wants_prompt_logprobs:
            continue
        request.prompt_logprobs_done = found[-1][0] == request.num_prompt_tokens - 1
        updates.append(RequestUpdate(request, prompt_logprobs=found))
    return updates
