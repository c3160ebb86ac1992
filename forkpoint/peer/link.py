"""A worker's link to other engines: the entries that it offers to them and fetches from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.peer.fetching import Fetching
from forkpoint.peer.offered import Offered
from forkpoint.peer.process_fetching import ProcessFetching
from forkpoint.peer.ring import RingFacts
from forkpoint.peer.server import OfferServer


@dataclass(frozen=True, slots=True)
class PeerLink:
    """Offers entries, fetches entries, or both. Without a `server`, nobody gets what is `offered`. Use `open_link`."""

    facts: PeerFacts
    fetching: Fetching | ProcessFetching
    offered: Offered
    server: OfferServer | None

    def use_buffers(self, take: Callable[[int], memoryview], give: Callable[[memoryview], None]) -> None:
        """Fetch into buffers that `take` returns, and give these and offered ones back once nobody needs them."""
        self.fetching.take, self.fetching.give, self.offered.give = take, give, give

    def use_rings(self, open_ring: Callable[[RingFacts], bool], close_ring: Callable[[bytes], None]) -> None:
        """Leave fetched entries in rings of other engines, if a process of its own fetches. See ProcessFetching."""
        if isinstance(self.fetching, ProcessFetching):
            self.fetching.use_rings(open_ring, close_ring)

    def in_ring(self, ticket: int, place: int) -> tuple[bytes, int] | None:
        """Return the id of the ring that an arrived entry is in, and its position; None if it is in a buffer."""
        return self.fetching.in_ring(ticket, place) if isinstance(self.fetching, ProcessFetching) else None

    def leave_ring(self, ring_id: bytes) -> None:
        """Note that an entry was written over before it was copied. See ProcessFetching."""
        if isinstance(self.fetching, ProcessFetching):
            self.fetching.leave_ring(ring_id)

    def close(self) -> None:
        self.fetching.close()
        if self.server is not None:
            self.server.close()


def open_link(
    facts: PeerFacts,
    unit_bytes: Mapping[int, int],
    lease_s: float,
    *,
    listens: bool,
    rank: int = 0,
    fetches_apart: bool = False,
) -> PeerLink:
    """Open a rank's link as `facts` describe it. With `listens`, others can fetch at the port of the link's facts.

    With `fetches_apart`, a process of its own fetches, to buffers that have to lie in shared memory. Raises OSError if
    the port cannot be had.
    """
    offered = Offered(facts.namespace, facts.max_bytes, lease_s)
    server: OfferServer | None = None
    if listens:
        server = OfferServer(offered, facts.namespace, facts.engine_id, facts.host, facts.port)
    fetching = (ProcessFetching if fetches_apart else Fetching)(facts.namespace, unit_bytes, rank)
    return PeerLink(replace(facts, port=0 if server is None else server.port), fetching, offered, server)
