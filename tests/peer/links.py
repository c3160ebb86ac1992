"""A prompt for tests of links, and how an engine offers and fetches it."""

from __future__ import annotations

import random

from forkpoint.cache.peer_offers import Fetch, PeerFacts
from forkpoint.cache.tier_entries import BLOCK, SLOT, EntryName
from forkpoint.peer.link import PeerLink
from forkpoint.peer.offered import OfferedEntry

SIZES = {BLOCK: 700, SLOT: 3000}
NAMES = (*(EntryName(BLOCK, bytes([i]) * 16, bytes([i - 1]) * 16, i) for i in range(1, 5)),)
NAMES = (*NAMES, EntryName(SLOT, bytes([4]) * 16, bytes([3]) * 16, 4, 1, True))
HOST, HOST_V6 = "127.0.0.1", "::1"


def facts(namespace: bytes = b"n" * 16, engine_id: str = "p") -> PeerFacts:
    return PeerFacts(namespace, engine_id, HOST, 0, ("loopback",), 10**6, 5.0)


def contents(name: EntryName) -> bytes:
    return random.Random(name.depth * 10 + name.kind).randbytes(SIZES[name.kind])


LEASES = iter(range(1, 10**6))


def offer(link: PeerLink) -> int:
    lease = next(LEASES)
    for name in NAMES:
        link.offered.add([OfferedEntry(name, contents(name), is_copied=True)], lease)
    link.offered.complete(lease)
    return lease


def fetch(
    link: PeerLink,
    port: int,
    lease: int,
    names: tuple[EntryName, ...] = NAMES,
    engine_id: str = "p",
    host: str = HOST,
) -> bool:
    """Fetch and return whether it succeeded. What arrives has to be right."""
    link.fetching.start(Fetch(1, host, (port,), engine_id, lease, names, 5.0))
    report = link.fetching.next_report(10.0)
    while report is None or not (report.done or report.failed):
        report = link.fetching.next_report(10.0)
    if report.failed:
        link.fetching.forget(1)
        return False
    for place, name in enumerate(names):
        assert link.fetching.contents(1, place) == contents(name), "another engine's bytes passed the check"
    link.fetching.forget(1)
    return True
