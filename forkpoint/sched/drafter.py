"""What guesses a row's next tokens. Whatever it says, the outputs are the same: only their speed depends on it."""

from __future__ import annotations

from forkpoint.cache.lease import Lease
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request


class Drafter:
    """Asked before each decode step of a row, and told what became of its guesses. This one never guesses."""

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        """Up to `most` ids that may follow the request's newest token (of one that goes ahead: the last that its step
        in flight samples), or TO_DRAFT for those that the runner is to make; None or empty: none."""
        return None

    def plans_early(self, request: Request, lease: Lease) -> bool:
        """Whether the request's next step is as well planned before what its last one sampled is known."""
        return False

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step took `num_accepted` of the `num_drafts` that it was given for the request."""

    def stepped(self, num_tokens: int, num_confirmed: int, elapsed_s: float | None) -> None:
        """A step computed `num_tokens` tokens and confirmed some of them. None: not of decode rows alone."""

    def forget(self, request: Request) -> None:
        """The request has ended."""
