"""The waiting queue. It also knows which prefixes will be asked for next."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.interest import PrefixInterest
from forkpoint.sched.scheduled_request import ScheduledRequest


class WaitingQueue:
    """Waiting requests by (priority, arrival), for others to read in `requests`; counts the prompts with each block."""

    def __init__(self) -> None:
        self.requests: list[ScheduledRequest] = []
        self._interest = PrefixInterest()

    def add(self, scheduled: ScheduledRequest) -> None:
        bisect.insort(self.requests, scheduled, key=lambda each: each.order)
        self._interest.add(self._reusable_hashes(scheduled))

    def remove(self, scheduled: ScheduledRequest) -> None:
        index = bisect.bisect_left(self.requests, scheduled.order, key=lambda each: each.order)
        assert self.requests[index] is scheduled
        del self.requests[index]
        self._interest.remove(self._reusable_hashes(scheduled))

    def is_more_urgent(self, scheduled: ScheduledRequest) -> bool:
        """Return whether a request of a smaller priority value than `scheduled` is waiting."""
        return bool(self.requests) and self.requests[0].order[0] < scheduled.order[0]

    def junctions(self, hashes: Sequence[BlockHash], start: int, end: int) -> frozenset[int]:
        """Return the positions in `(start, end]` of the history `hashes` at which a waiting prompt parts from it."""
        junctions: list[int] = []
        before = 0
        counts = itertools.chain(self._interest.counts(hashes), [0])
        for position, here in zip(itertools.count(0, BLOCK_SIZE), counts, strict=False):
            if position > end:
                break
            if here < before and position > start:
                junctions.append(position)
            before = here
        return frozenset(junctions)

    def _reusable_hashes(self, scheduled: ScheduledRequest) -> list[BlockHash]:
        usable = CacheLayout.usable_prefix(scheduled.request.num_tokens)
        return scheduled.lease.chain.hashes[: usable // BLOCK_SIZE]
