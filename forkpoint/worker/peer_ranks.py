"""The links of several ranks as one: each rank exchanges its own share of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.sched.plan import FetchReport

ALL: Final = 1 << 62  # entries of a fetch that is done
MOST_OPEN: Final = 4096  # fetches that have not ended on all ranks; a rank does not report the end of a dropped one


@dataclass(slots=True)
class RankedFetch:
    """The ranks' reports of one fetch."""

    counts: list[int]  # each rank's entries
    num_reported: int = 0  # entries of all ranks that `merge` has returned
    num_ended: int = 0  # ranks on which it is done or failed
    failed: bool = False
    unreachable: bool = False


class FetchTickets:
    """Collects the ranks' reports. A fetch is done when it is so on all ranks, and failed if it failed on one.

    An entry has arrived when each rank has its share.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, RankedFetch] = {}  # by ticket

    def merge(self, reports: Sequence[FetchReport | None]) -> FetchReport | None:
        """Return what all ranks have reported by now; `reports` has one of each rank. None: nothing is new."""
        for rank, each in enumerate(reports):
            if each is not None:
                self._add(rank, each)
        ended = {ticket: fetch for ticket, fetch in self._open.items() if fetch.num_ended == self._num_ranks}
        for ticket in ended:
            del self._open[ticket]
        grown: list[tuple[int, int]] = []
        for ticket, fetch in self._open.items():
            if min(fetch.counts) > fetch.num_reported:
                fetch.num_reported = min(fetch.counts)
                grown.append((ticket, fetch.num_reported))
        while len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        if not ended and not grown:
            return None
        return FetchReport(
            done=tuple(ticket for ticket, fetch in ended.items() if not fetch.failed),
            failed=tuple(ticket for ticket, fetch in ended.items() if fetch.failed),
            unreachable=tuple(ticket for ticket, fetch in ended.items() if fetch.unreachable),
            arrived=tuple(grown),
        )

    def _add(self, rank: int, report: FetchReport) -> None:
        for ticket, count in (*report.arrived, *((ticket, ALL) for ticket in report.done)):
            self._fetch(ticket).counts[rank] = count
        for ticket in (*report.done, *report.failed):
            self._fetch(ticket).num_ended += 1
        for ticket in report.failed:
            self._fetch(ticket).failed = True
        for ticket in report.unreachable:
            self._fetch(ticket).unreachable = True

    def _fetch(self, ticket: int) -> RankedFetch:
        return self._open.setdefault(ticket, RankedFetch([0] * self._num_ranks))


def common_peers(links: Sequence[PeerFacts | None]) -> PeerFacts | None:
    """Return the first rank's link with the ports of all; None if there is none."""
    first = links[0]
    if first is None:
        return None
    return replace(first, more_ports=tuple(link.port for link in links[1:] if link is not None))
