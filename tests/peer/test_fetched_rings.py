"""Entries that stay in the ring of the prefill engine's device until the decode engine copies them from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from forkpoint.cache.peer_offers import Fetch, FetchReport
from forkpoint.cache.tier_entries import EntryName
from forkpoint.peer.fetching import Fetching
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.peer.offered import OfferedEntry
from forkpoint.peer.process_fetching import ProcessFetching
from forkpoint.peer.protocol import HeldEntries
from forkpoint.peer.ring import Ring, RingFacts
from forkpoint.shared_arrays import CAN_SHARE
from tests.peer.links import HOST, NAMES, SIZES, contents, facts

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="this system has no memory for several processes")
HANDLE = b"handle of the ring"


@pytest.fixture
def prefill() -> Iterator[PeerLink]:
    with closing(open_link(facts(), SIZES, 3600.0, listens=True)) as link:
        link.offered.ring = Ring(HANDLE, 10_000)
        yield link


class Decode:
    """The decode engine's side, and what it was told of rings."""

    def __init__(self, fetching: ProcessFetching) -> None:
        self.fetching, self.opened, self.closed, self.can_open = fetching, list[RingFacts](), list[bytes](), True
        fetching.use_rings(self._open, self.closed.append)

    def _open(self, ring: RingFacts) -> bool:
        self.opened.append(ring)
        return self.can_open

    def fetch(self, link: PeerLink, lease: int, names: Sequence[EntryName] = NAMES, host: str = HOST) -> FetchReport:
        self.fetching.start(Fetch(lease, host, (link.facts.port,), "p", lease, tuple(names), 30.0))
        while True:
            report = self.fetching.next_report(20.0)
            assert report is not None, "nothing came in 20 s"
            if report.done or report.failed:
                return report

    def places(self, lease: int) -> list[tuple[bytes, int] | None]:
        return [self.fetching.in_ring(lease, place) for place in range(len(NAMES))]


@pytest.fixture
def decode(fetching: ProcessFetching) -> Decode:
    return Decode(fetching)


def offer(link: PeerLink, lease: int) -> list[int]:
    """Offer all entries, and return their positions in the ring."""
    assert link.offered.ring is not None
    positions = list[int]()
    for name in NAMES:
        position = link.offered.ring.take(SIZES[name.kind])
        assert position is not None
        link.offered.add([OfferedEntry(name, contents(name), position, is_copied=True)], lease)
        positions.append(position)
    link.offered.complete(lease)
    return positions


def id_of(link: PeerLink) -> bytes:
    assert link.offered.ring is not None
    return link.offered.ring.facts.ring_id


def in_ring(link: PeerLink, positions: Sequence[int]) -> list[tuple[bytes, int]]:
    return [(id_of(link), position) for position in positions]


def test_entries_stay_in_a_ring_that_is_open(prefill: PeerLink, decode: Decode) -> None:
    offer(prefill, 1)
    assert decode.fetch(prefill, 1).done == (1,)
    assert decode.places(1) == [None] * len(NAMES), "nobody had opened the ring"
    assert prefill.offered.ring is not None and {ring.handle for ring in decode.opened} == {HANDLE}
    positions = offer(prefill, 2)
    assert decode.fetch(prefill, 2).done == (2,)
    assert decode.places(2) == in_ring(prefill, positions)
    assert len(decode.opened) == 1 and not decode.closed


def test_entries_that_were_written_over_come_to_buffers(prefill: PeerLink, decode: Decode) -> None:
    offer(prefill, 1)
    decode.fetch(prefill, 1)
    positions = offer(prefill, 2)
    assert prefill.offered.ring is not None
    prefill.offered.ring.take(4000)  # over the first two
    assert decode.fetch(prefill, 2).done == (2,)
    found = decode.places(2)
    held = [prefill.offered.ring.holds(position) for position in positions]
    assert held == [False, False, True, True, True]
    assert [place is not None for place in found] == held
    for place, name in enumerate(NAMES):
        assert held[place] or decode.fetching.contents(2, place) == contents(name)


def test_entries_of_a_ring_and_of_the_host_keep_their_order(prefill: PeerLink, decode: Decode) -> None:
    offer(prefill, 1)
    decode.fetch(prefill, 1)
    assert prefill.offered.ring is not None
    for place, name in enumerate(NAMES):
        position = None if place % 2 else prefill.offered.ring.take(SIZES[name.kind])
        data = contents(name) if place % 2 else bytes(SIZES[name.kind])
        prefill.offered.add(
            [OfferedEntry(replace(name, hash=bytes([place + 100]) * 16), data, position, is_copied=True)], 2
        )
    prefill.offered.complete(2)
    names = [replace(name, hash=bytes([place + 100]) * 16) for place, name in enumerate(NAMES)]
    assert decode.fetch(prefill, 2, names).done == (2,)
    assert [place is not None for place in decode.places(2)] == [True, False, True, False, True]
    assert all(decode.fetching.contents(2, place) == contents(NAMES[place]) for place in (1, 3))


def test_entries_in_a_ring_have_the_names_that_are_asked_for(prefill: PeerLink, decode: Decode) -> None:
    """A name says more than the hash that finds an entry: whether a state was decoded, for example."""
    offer(prefill, 1)
    decode.fetch(prefill, 1)
    offer(prefill, 2)
    assert decode.fetch(prefill, 2, [*NAMES[:-1], replace(NAMES[-1], decoded=False)]).failed == (2,)


def test_a_ring_that_cannot_be_opened_is_left_alone(prefill: PeerLink, decode: Decode) -> None:
    decode.can_open = False
    for lease in (1, 2, 3):
        offer(prefill, lease)
        assert decode.fetch(prefill, lease).done == (lease,)
        assert decode.places(lease) == [None] * len(NAMES)
    prefill.close()
    assert decode.fetch(prefill, 4).unreachable == (4,)
    assert len(decode.opened) == 1 and not decode.closed


def test_a_ring_that_an_engine_has_under_two_addresses_is_open_until_neither_answers(
    prefill: PeerLink, decode: Decode
) -> None:
    for lease, host in enumerate((HOST, "localhost", HOST, "localhost"), 1):
        positions = offer(prefill, lease)
        assert decode.fetch(prefill, lease, host=host).done == (lease,)
        assert decode.places(lease) == ([None] * len(NAMES) if lease < 3 else in_ring(prefill, positions))
    assert len(decode.opened) == 1
    prefill.close()
    assert decode.fetch(prefill, 5).unreachable == (5,) and not decode.closed
    assert decode.fetch(prefill, 6, host="localhost").unreachable == (6,)
    assert decode.closed == [id_of(prefill)]


def test_a_ring_is_left_alone_for_a_while_after_a_copy_from_it_was_lost(
    prefill: PeerLink, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts wait too long for it, and would be lost one after the other."""
    for lease in (1, 2):
        positions = offer(prefill, lease)
        decode.fetch(prefill, lease)
    assert decode.places(2) == in_ring(prefill, positions)
    decode.fetching.leave_ring(id_of(prefill))
    offer(prefill, 3)
    assert decode.fetch(prefill, 3).done == (3,) and decode.places(3) == [None] * len(NAMES)
    monkeypatch.setattr("forkpoint.peer.process_fetching.RING_AVOIDED_S", 0.0)
    decode.fetching.leave_ring(id_of(prefill))
    positions = offer(prefill, 4)
    assert decode.fetch(prefill, 4).done == (4,) and decode.places(4) == in_ring(prefill, positions)
    assert len(decode.opened) == 1 and not decode.closed


def test_nothing_stays_in_a_ring_without_shared_memory(prefill: PeerLink, decode: Decode) -> None:
    decode.fetching.shares_memory = False
    for lease in (1, 2):
        offer(prefill, lease)
        assert decode.fetch(prefill, lease).done == (lease,)
        assert decode.places(lease) == [None] * len(NAMES)
    assert not decode.opened


def test_a_new_ring_takes_the_place_of_the_old_one(prefill: PeerLink, decode: Decode) -> None:
    offer(prefill, 1)
    decode.fetch(prefill, 1)
    first = id_of(prefill)
    prefill.offered.ring = Ring(HANDLE, 10_000)
    for lease in (2, 3):
        positions = offer(prefill, lease)
        decode.fetch(prefill, lease)
    assert decode.places(2) == [None] * len(NAMES)
    assert decode.places(3) == in_ring(prefill, positions)
    assert decode.closed == [first]


def test_the_ring_of_an_engine_that_does_not_answer_is_closed(prefill: PeerLink, decode: Decode) -> None:
    offer(prefill, 1)
    decode.fetch(prefill, 1)
    prefill.close()
    report = decode.fetch(prefill, 2)
    assert report.failed == report.unreachable == (2,)
    assert decode.closed == [id_of(prefill)]


class Direct:
    """A decode engine whose fetches run in its own process, and the rings that it was told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetching, self.found = Fetching(facts().namespace, SIZES), list[RingFacts]()
        monkeypatch.setattr(self.fetching, "_note_ring", lambda fetch, ring: self.found.append(ring))

    def fetch(self, link: PeerLink, lease: int, ring: bytes = b"") -> FetchReport:
        self.fetching.start(Fetch(lease, HOST, (link.facts.port,), "p", lease, NAMES, 30.0), ring=ring)
        report = self.fetching.next_report(20.0)
        assert report is not None
        return report


def test_parts_of_an_entry_may_be_at_several_positions(prefill: PeerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another prompt offers the entry again while its parts are fetched. Each position has all of it."""
    monkeypatch.setattr("forkpoint.peer.protocol.PART_BYTES", 450)  # blocks have two parts, states seven
    wait_for, positions = prefill.offered.wait_for, dict[bytes, list[int | None]]()

    def found(lease: int, keys: Sequence[bytes], wait_s: float) -> list[OfferedEntry]:
        [entry] = wait_for(lease, keys[:1], wait_s)
        assert prefill.offered.ring is not None
        entry.position = prefill.offered.ring.take(len(entry.data))
        positions.setdefault(keys[0], []).append(entry.position)
        return [entry]

    monkeypatch.setattr(prefill.offered, "wait_for", found)
    prefill.offered.ring = Ring(HANDLE, 100_000)
    offer(prefill, 1)
    direct = Direct(monkeypatch)
    assert direct.fetch(prefill, 1, id_of(prefill)).done == (1,)
    assert [len(each) for each in positions.values()] == [2, 2, 2, 2, 7]


def test_a_ring_that_was_not_asked_for_is_not_opened(prefill: PeerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of another machine."""
    assert prefill.offered.ring is not None
    monkeypatch.setattr("forkpoint.peer.server.HeldEntries", lambda ring: HeldEntries(ring=known))
    known, direct = prefill.offered.ring.facts, Direct(monkeypatch)
    offer(prefill, 1)
    assert direct.fetch(prefill, 1).done == (1,) and direct.found == [known]
    offer(prefill, 2)
    direct.fetching.shares_memory = False
    assert direct.fetch(prefill, 2).unreachable == (2,) and direct.found == [known]
