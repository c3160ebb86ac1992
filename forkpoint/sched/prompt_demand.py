"""How many prompt tokens wait for room in the next step."""

from __future__ import annotations

import itertools

from forkpoint.sched.plan import StepPlan
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.running import RunningSet


class PromptDemand:
    """Counts the tokens of running and waiting prompts that the next step could compute."""

    def __init__(self, waiting: WaitingQueue, running: RunningSet) -> None:
        self._waiting, self._running = waiting, running
        self._is_blocked = False  # whether memory had no room for a waiting request in the last step

    def num_tokens(self, most: int) -> int:
        """Return the number of these tokens, at most `most`.

        As many waiting prompts count as there are free rows, without what they would find cached. None counts if the
        last step admitted nothing although requests waited, because then memory has no room for them.
        """
        total = 0
        for scheduled in self._running.requests:
            total += max(0, scheduled.prefill_end - scheduled.lease.num_planned)
            if total >= most:
                return most
        if self._is_blocked:
            return total
        for scheduled in itertools.islice(self._waiting.requests, len(self._running.free_rows)):
            total += scheduled.request.num_tokens
            if scheduled.expected is not None:
                total -= scheduled.expected.num_tokens
            if total >= most:
                return most
        return total

    def note_plan(self, plan: StepPlan) -> None:
        """Note what a step computes."""
        self._is_blocked = bool(self._waiting.requests) and plan.num_decodes == len(plan.rows)
