"""A worker's link to other engines: what it offers to them, and what it fetches from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from forkpoint.cache.disk_entries import EntryName
from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.peer.fetching import Fetching
from forkpoint.peer.offered import Buffer, Offered
from forkpoint.peer.server import OfferServer


@dataclass(frozen=True, slots=True)
class PeerLink:
    """Offers entries, fetches entries, or both. Use `open_link`."""

    facts: PeerFacts
    fetching: Fetching
    offered: Offered | None
    server: OfferServer | None

    def offer(self, name: EntryName, data: Buffer, lease: int) -> None:
        """Let other engines fetch an entry whose bytes nobody changes any more."""
        assert self.offered is not None
        self.offered.add(name, data, lease)

    def complete(self, lease: int) -> None:
        """Note that a lease gets no more entries."""
        if self.offered is not None:
            self.offered.complete(lease)

    def end(self, lease: int) -> None:
        """Let nobody fetch the entries of a lease any more."""
        if self.offered is not None:
            self.offered.end(lease)

    def use_buffers(self, take: Callable[[int], memoryview], give: Callable[[memoryview], None]) -> None:
        """Fetch into buffers that `take` returns, and give these and offered ones back once nobody needs them."""
        self.fetching.take, self.fetching.give = take, give
        if self.offered is not None:
            self.offered.give = give

    def withdraw(self, block_hash: bytes | None) -> None:
        if self.offered is not None:
            self.offered.withdraw(block_hash)

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
    fetching = Fetching(facts.namespace, unit_bytes, rank)
    if not listens:
        return PeerLink(replace(facts, port=0), fetching, None, None)
    offered = Offered(facts.namespace, facts.max_bytes, lease_s)
    server = OfferServer(offered, facts.namespace, facts.engine_id, facts.host, facts.port)
    return PeerLink(replace(facts, port=server.port), fetching, offered, server)
