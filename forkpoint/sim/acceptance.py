"""A drafter with a fixed acceptance length, whatever its drafts are."""

from __future__ import annotations

import math

import numpy as np

from forkpoint.cache.lease import Lease
from forkpoint.errors import ConfigError
from forkpoint.json_options import MAX_DRAFTS
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request


class SetAcceptance(Drafter):
    """Gives every row `num_drafts` drafts where there is room, of which a fixed number is accepted.

    A row's steps produce `length` tokens on average, its own included: 2.5 alternates between 2 and 3 tokens. Drafting
    takes no time. Raises ConfigError.
    """

    def __init__(self, length: float, num_drafts: int) -> None:
        if not 1 <= num_drafts <= MAX_DRAFTS:
            raise ConfigError(f"num_speculative_tokens={num_drafts} is not allowed; give 1 to {MAX_DRAFTS}")
        if not 1 <= length <= num_drafts + 1:
            raise ConfigError(
                f"acceptance_length={length} is not allowed; with {num_drafts} drafts give 1 to {num_drafts + 1}"
            )
        self._num_drafts = num_drafts
        self._length = length
        self._owed: dict[str, float] = {}  # by request id, the fraction of an accepted draft carried over

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        return np.zeros(min(most, self._num_drafts), np.int32)

    def accept(self, request_id: str, num_drafts: int) -> int:
        """Return how many of a row's drafts are accepted in its next step. Fractions are carried over."""
        owed = self._owed.get(request_id, 0.0) + self._length - 1
        whole = math.floor(owed + 1e-9)
        self._owed[request_id] = owed - whole
        return min(num_drafts, whole)

    def forget(self, request: Request) -> None:
        self._owed.pop(request.id, None)
