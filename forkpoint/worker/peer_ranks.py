"""The links of several ranks as one: each rank exchanges its own share of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.sched.plan import FetchReport
from forkpoint.worker.disk_ranks import Reports

ALL: Final = 1 << 62  # entries of a fetch that is done
MOST_ARRIVING: Final = 4096  # fetches whose progress is known; those that nobody waits for any more report no end


class FetchTickets:
    """Collects the ranks' reports. A fetch is done when it is so on all ranks, and failed if it failed on one.

    An entry has arrived when each rank has its share.
    """

    def __init__(self, num_ranks: int) -> None:
        self._reports = Reports(num_ranks)
        self._unreachable = set[int]()
        self._arrived: dict[int, list[int]] = {}  # ticket -> each rank's entries, and those that all have reported
        self._num_ranks = num_ranks

    def merge(self, reports: Sequence[FetchReport | None]) -> FetchReport | None:
        """Return what all ranks have reported by now; `reports` has one of each rank. None: nothing is new."""
        grown: list[tuple[int, int]] = []
        for rank, each in enumerate(reports):
            if each is None:
                continue
            self._reports.add(each.done, each.failed)
            self._unreachable.update(each.unreachable)
            for ticket, count in (*each.arrived, *((ticket, ALL) for ticket in each.done)):
                counts = self._arrived.setdefault(ticket, [0] * (self._num_ranks + 1))
                counts[rank] = count
        done, failed = self._reports.take()
        for ticket in (*done, *failed):
            self._arrived.pop(ticket, None)
        for ticket, (*counts, reported) in self._arrived.items():
            if min(counts) > reported:
                self._arrived[ticket][-1] = min(counts)
                grown.append((ticket, min(counts)))
        while len(self._arrived) > MOST_ARRIVING:
            del self._arrived[next(iter(self._arrived))]
        if not done and not failed and not grown:
            return None
        unreachable = tuple(ticket for ticket in failed if ticket in self._unreachable)
        self._unreachable.difference_update(unreachable)
        return FetchReport(done, failed, unreachable, tuple(grown))


def common_peers(links: Sequence[PeerFacts | None]) -> PeerFacts | None:
    """Return the first rank's link with the ports of all; None if there is none."""
    first = links[0]
    if first is None:
        return None
    return replace(first, more_ports=tuple(link.port for link in links[1:] if link is not None))
