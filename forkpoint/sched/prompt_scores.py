"""Log-probabilities of prompt tokens in the results of steps."""

from __future__ import annotations

from forkpoint.sched.plan import StepResult
from forkpoint.sched.request import RequestUpdate
from forkpoint.sched.scheduled_request import IssuedStep


def take_prompt_logprobs(issued: IssuedStep, result: StepResult) -> list[RequestUpdate]:
    """Return updates with the log-probabilities of prompt tokens, for the requests that want them.

    A request whose last prompt token is among them wants no more.
    """
    updates = []
    for scheduled in issued.requests:
        request, found = scheduled.request, result.prompt_logprobs.get(scheduled.row)
        if found is None or scheduled.ended or not request.wants_prompt_logprobs:
            continue
        request.prompt_logprobs_done = found[-1][0] == request.num_prompt_tokens - 1
        updates.append(RequestUpdate(request, prompt_logprobs=found))
    return updates
