"""The interface of drafters, which guess a row's next tokens. Outputs do not depend on the guesses, only speed does."""

from __future__ import annotations

from forkpoint.cache.lease import Lease
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request


class Drafter:
    """Called before each decode step of a row, and again with the outcome. This base class never guesses."""

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        """Return up to `most` ids that may follow the request's newest token; None or empty: there are none.

        If the row is planned early, the newest token is the last one that its step in flight samples. TO_DRAFT stands
        for an id that the runner guesses.
        """
        return None

    def plans_early(self, request: Request, lease: Lease) -> bool:
        """Return whether the request's next step may as well be planned before the result of its last one."""
        return False

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learn that a step accepted `num_accepted` of the request's `num_drafts` drafts."""

    def stepped(self, num_tokens: int, num_confirmed: int, elapsed_s: float | None) -> None:
        """Learn that a step computed `num_tokens` tokens and confirmed `num_confirmed`, in `elapsed_s` seconds.

        `elapsed_s` is None if the step had other rows than decode rows.
        """

    def forget(self, request: Request) -> None:
        """Learn that the request has ended."""
