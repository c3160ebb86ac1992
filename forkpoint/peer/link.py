"""A worker's link to other engines: the entries that it offers to them and fetches from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.peer.fetching import Fetching
from forkpoint.peer.offered import Offered
from forkpoint.peer.server import OfferServer


@dataclass(frozen=True, slots=True)
class PeerLink:
    """Offers entries, fetches entries, or both. Without a `server`, nobody gets what is `offered`. Use `open_link`."""

    facts: PeerFacts
    fetching: Fetching
    offered: Offered
    server: OfferServer | None

    def use_buffers(self, take: Callable[[int], memoryview], give: Callable[[memoryview], None]) -> None:
        """Fetch into buffers that `take` returns, and give these and offered ones back once nobody needs them."""
        self.fetching.take, self.fetching.give, self.offered.give = take, give, give

    def close(self) -> None:
        self.fetching.close()
        if self.server is not None:
            self.server.close()


def open_link(
    facts: PeerFacts, unit_bytes: Mapping[int, int], lease_s: float, *, listens: bool, rank: int = 0
) -> PeerLink:
    """Open a rank's link as `facts` describe it. With `listens`, others can fetch at the port of the link's facts.

    Raises OSError if that port cannot be had.
    """
    fetching, offered = Fetching(facts.namespace, unit_bytes, rank), Offered(facts.namespace, facts.max_bytes, lease_s)
    if not listens:
        return PeerLink(replace(facts, port=0), fetching, offered, None)
    server = OfferServer(offered, facts.namespace, facts.engine_id, facts.host, facts.port)
    return PeerLink(replace(facts, port=server.port), fetching, offered, server)
