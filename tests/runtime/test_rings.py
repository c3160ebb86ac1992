"""Units that a decode engine copies from the ring of a prefill engine, which goes on writing meanwhile."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import msgspec
import pytest
import torch
from torch import Tensor

from forkpoint.cache.peer_offers import Fetch, PeerFacts
from forkpoint.cache.tier_entries import BLOCK, SLOT, EntryName
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.peer.offered import OfferedEntry, key_of
from forkpoint.peer.ring import RingFacts
from forkpoint.platforms.copy_stream import copy_all
from forkpoint.runtime.after_copies import AtOnce
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.copy_lane import CopyBatch
from forkpoint.runtime.rings import OwnRing, PeerRings
from forkpoint.runtime.units import unit_bytes, unit_extent
from forkpoint.sched.plan import Move, MoveKind, MoveRoute
from forkpoint.shared_arrays import CAN_SHARE, Place, SharedMemory
from tests.late_streams import ComputeEvent, LatePlatform
from tests.sched.harness import LAYOUTS

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="this system has no memory for several processes")
LAYOUT, HOST = LAYOUTS["one each"], "127.0.0.1"
SIZES = {BLOCK: unit_bytes(LAYOUT, MoveKind.BLOCK), SLOT: unit_bytes(LAYOUT, MoveKind.SLOT)}
NUM_PAGES, NUM_PROMPTS = 8, 40


class Worker:
    """An engine's arena and its link."""

    def __init__(self, seed: int, link: PeerLink, ring_bytes: int) -> None:
        self.platform, self.link = LatePlatform(seed, chance=0.3), link
        self.arena = ArenaBuffer(LAYOUT, NUM_PAGES, self.platform)
        self.arena.use_peers(link, ring_bytes)

    def unit(self, kind: MoveKind, number: int) -> Tensor:
        return self.arena.data[unit_extent(LAYOUT, kind, number)]


@contextmanager
def worker(seed: int, engine_id: str, ring_bytes: int = 0) -> Iterator[Worker]:
    facts = PeerFacts(b"n" * 16, engine_id, HOST, 0, ("loopback",), 1 << 26, 30.0)
    listens = engine_id == "p"
    link = open_link(facts, SIZES, 3600.0, listens=listens, fetches_apart=not listens)
    found = Worker(seed, link, ring_bytes)
    with closing(found.arena):
        yield found


def offer(prefill: Worker, lease: int, *, waits: bool = True) -> tuple[EntryName, ...]:
    """Offer a block and a state of new contents, and wait until they are on the host."""
    names = (
        EntryName(BLOCK, lease.to_bytes(16), bytes(16), 1),
        EntryName(SLOT, lease.to_bytes(16), bytes(16), 1, 1, True),
    )
    for kind, number in ((MoveKind.BLOCK, 1), (MoveKind.SLOT, 2)):
        prefill.unit(kind, number).fill_(lease % 251)
    moves = [
        Move(MoveKind.BLOCK, 1, 0, MoveRoute.OFFER, lease, names[0]),
        Move(MoveKind.SLOT, 2, 0, MoveRoute.OFFER, lease, names[1]),
        Move(MoveKind.BLOCK, 0, 0, MoveRoute.OFFER, lease),
    ]
    prefill.arena.move(moves)
    if waits:
        prefill.platform.synchronize()
    # A step may write to the units from now on.
    for kind, number in ((MoveKind.BLOCK, 1), (MoveKind.SLOT, 2)):
        prefill.unit(kind, number).fill_(255)
    return names


def fetch(decode: Worker, prefill: Worker, lease: int, names: tuple[EntryName, ...]) -> None:
    decode.link.fetching.start(Fetch(lease, HOST, (prefill.link.facts.port,), "p", lease, names, 30.0))
    while (report := decode.link.fetching.next_report(20.0)) is not None and not report.done:
        assert not report.failed
    assert report is not None, "nothing came in 20 s"


@pytest.mark.parametrize("seed", range(3))
def test_a_unit_has_the_offered_contents_or_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring has room for three prompts. Copies to the decode engine run late."""
    monkeypatch.setattr("forkpoint.peer.process_fetching.RING_AVOIDED_S", 0.0)
    chance, ring_bytes = random.Random(seed), 3 * (SIZES[BLOCK] + SIZES[SLOT])
    with worker(seed, "p", ring_bytes) as prefill, worker(seed + 100, "d") as decode:
        num_lost = num_landed = num_in_ring = 0
        lease = 0
        for _ in range(NUM_PROMPTS):
            lease += 1
            wanted, names = lease, offer(prefill, lease)
            fetch(decode, prefill, wanted, names)
            places = [decode.link.in_ring(wanted, place) for place in (0, 1)]
            num_in_ring += sum(place is not None for place in places)
            tickets = {2 * wanted: MoveKind.BLOCK, 2 * wanted + 1: MoveKind.SLOT}
            staged = [
                Move(kind, n, wanted, MoveRoute.STAGE, ticket) for n, (ticket, kind) in enumerate(tickets.items())
            ]
            decode.arena.move([*staged, Move(MoveKind.BLOCK, 0, 0, MoveRoute.FORGET, wanted)])
            for _ in range(chance.choice([0, 0, 1, 4])):
                lease += 1
                offer(prefill, lease)
            left = dict(tickets)
            while left:
                report = decode.arena.next_report()
                for ticket in () if report is None else report.failed:
                    assert places[ticket % 2] is not None, "a buffer is never lost"
                    decode.arena.move([Move(left.pop(ticket), 0, 0, MoveRoute.DISCARD, ticket)])
                    num_lost += 1
                for ticket in () if report is None else report.done:
                    kind = left.pop(ticket)
                    decode.arena.move([Move(kind, 0, 3, MoveRoute.LAND, ticket)])
                    assert torch.equal(decode.unit(kind, 3), torch.full_like(decode.unit(kind, 3), wanted % 251))
                    num_landed += 1
        assert num_landed + num_lost == 2 * NUM_PROMPTS
        assert num_lost > 2 and num_landed > NUM_PROMPTS and num_in_ring > NUM_PROMPTS


def test_no_call_copies_to_a_place_of_the_ring_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may make the copies of a call in any order. The plan offers more than the ring has room for."""
    ends = list[int]()

    def checked(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        places = sorted((target.data_ptr(), target.data_ptr() + len(target)) for target in targets)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        ends.extend(end for _, end in places)
        copy_all(targets, sources)

    monkeypatch.setattr("forkpoint.runtime.host_copies.copy_all", checked)
    with worker(0, "p", 3 * SIZES[BLOCK]) as prefill:
        names = [EntryName(BLOCK, lease.to_bytes(16), bytes(16), 1) for lease in range(1, 9)]
        prefill.arena.move([Move(MoveKind.BLOCK, 1, 0, MoveRoute.OFFER, n, name) for n, name in enumerate(names, 1)])
        prefill.platform.synchronize()
    assert len(set(ends)) < len(ends) == 16


def test_a_ring_is_written_before_units_are_offered_although_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host are made at once then, and the units may be offered before the plan has been noted."""

    def new_buffer(num_bytes: int) -> Tensor:
        raise torch.OutOfMemoryError

    with worker(0, "p", 1 << 20) as prefill:
        monkeypatch.setattr(prefill.arena.copies, "_new_buffer", new_buffer)
        monkeypatch.setattr(prefill.arena._peer_copies, "_offers", AtOnce())
        given, add = list[bytes](), prefill.link.offered.add

        def noted(entries: Sequence[OfferedEntry], lease: int) -> None:
            assert prefill.link.offered.ring is not None
            memory = prefill.platform.shared[prefill.link.offered.ring.facts.handle]
            for entry in entries:
                assert entry.position is not None
                given.append(memory[entry.position : entry.position + len(entry.data)].numpy().tobytes())
            add(entries, lease)

        prefill.link.offered.add = noted  # type: ignore[method-assign]
        offer(prefill, 2)
        assert given == [bytes([2]) * SIZES[BLOCK], bytes([2]) * SIZES[SLOT]]


def test_units_of_a_ring_are_offered_once_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not offered before the steps in front of their copies have ended. They come to the host later."""
    is_computed = False
    monkeypatch.setattr(ComputeEvent, "query", lambda event: is_computed)
    with worker(0, "p", 1 << 20) as prefill:
        prefill.platform.world.chance = 0.0
        offered, keys = prefill.link.offered, [key_of(name) for name in offer(prefill, 2, waits=False)]
        assert not offered.wait_for(2, keys, 0.2)
        is_computed = True
        entries = offered.wait_for(2, keys, 5.0)
        assert len(entries) == 2 and not any(offered.wait_for_copy(each, 0.05) for each in entries)
        assert offered.wait_until_complete(2, 5.0)
        prefill.platform.world.chance = 1.0
        for each in entries:
            assert offered.wait_for_copy(each, 5.0) and bytes(each.data) == bytes([2]) * len(each.data)
        offered.sent(entries)


def test_a_closed_worker_leaves_no_threads() -> None:
    before = threading.enumerate()
    with worker(0, "p", 1 << 20):
        assert len([thread for thread in threading.enumerate() if thread not in before]) >= 3
    assert not [thread for thread in threading.enumerate() if thread not in before]


def copies_in_memory() -> list[CopyBatch]:
    """Return the batches of copies that have tensors."""
    return [each for each in gc.get_objects() if isinstance(each, CopyBatch) and each.tensors]


def test_copies_of_offers_are_dropped_once_they_are_done() -> None:
    """They keep buffers of the device."""
    gc.collect()
    before = copies_in_memory()  # other tests have some
    with worker(0, "p", 1 << 20) as prefill, worker(1, "d") as decode:
        fetch(decode, prefill, 2, offer(prefill, 2))
        prefill.platform.synchronize()
        prefill.arena.next_report()
        assert not [each for each in copies_in_memory() if not any(each is other for other in before)]


def test_prompts_come_to_buffers_for_a_while_after_one_was_lost() -> None:
    ring_bytes = 3 * (SIZES[BLOCK] + SIZES[SLOT])
    with worker(0, "p", ring_bytes) as prefill, worker(1, "d") as decode:
        for lease in (1, 2):
            fetch(decode, prefill, lease, offer(prefill, lease))
        decode.arena.move([Move(MoveKind.BLOCK, 0, 2, MoveRoute.STAGE, 9)])
        for lease in range(3, 7):
            names = offer(prefill, lease)
        report = None
        while report is None:
            report = decode.arena.next_report()
        assert report.failed == (9,)
        fetch(decode, prefill, 6, names)
        assert decode.link.in_ring(6, 0) is None


def test_a_unit_of_a_ring_that_was_closed_is_lost() -> None:
    with worker(0, "p", 1 << 20) as prefill, worker(1, "d") as decode:
        for lease in (1, 2):
            fetch(decode, prefill, lease, offer(prefill, lease))
        prefill.link.close()
        decode.link.fetching.start(Fetch(3, HOST, (prefill.link.facts.port,), "p", 3, offer(prefill, 3), 30.0))
        while (report := decode.link.fetching.next_report(20.0)) is not None and not report.failed:
            pass
        decode.arena.move([Move(MoveKind.BLOCK, 0, 2, MoveRoute.STAGE, 9)])
        found = decode.arena.next_report()
        assert found is not None and found.failed == (9,) and not found.done
        decode.arena.move([Move(MoveKind.BLOCK, 0, 0, MoveRoute.DISCARD, 9)])


def test_a_unit_of_a_ring_comes_without_memory_for_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker(0, "p", 1 << 20) as prefill, worker(1, "d") as decode:
        for lease in (1, 2):
            fetch(decode, prefill, lease, offer(prefill, lease))
        decode.platform.world.has_memory = False

        def refused(source: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("the copy would be in the device's memory, as the ring is")

        monkeypatch.setattr(Tensor, "clone", refused)
        decode.arena.move([Move(MoveKind.BLOCK, 0, 2, MoveRoute.STAGE, 9)])
        report = decode.arena.next_report()
        assert report is not None and report.done == (9,)
        decode.arena.move([Move(MoveKind.BLOCK, 0, 3, MoveRoute.LAND, 9)])
        assert (decode.unit(MoveKind.BLOCK, 3) == 2).all()


def facts_of(link: PeerLink) -> RingFacts:
    assert link.offered.ring is not None
    return link.offered.ring.facts


NO_NOTES = {
    "an ended process": Place(2**22 + 1, 3, 5, 0),
    "a negative process": Place(-1, -1, -1, -1),
    "no number of a byte": Place(os.getpid(), 0, 0, 2**64 - 1),
}


@pytest.mark.parametrize("note", NO_NOTES.values(), ids=NO_NOTES)
def test_a_ring_whose_note_cannot_be_read_is_not_opened(note: Place) -> None:
    """Containers may share a GPU and not /proc. All prompts would be lost."""
    with worker(0, "p", 1 << 20) as prefill, worker(1, "d") as decode:
        facts = facts_of(prefill.link)
        if note.process_id == os.getpid():  # the memory is there
            note = facts.note._replace(offset=note.offset)
        rings = PeerRings(decode.platform)
        assert not rings.open(msgspec.structs.replace(facts, note=note))
        assert decode.platform.num_opened == 0
        assert rings.open(facts) and decode.platform.num_opened == 1
        rings.close_all()
        assert decode.platform.num_opened == 0


def test_a_ring_of_another_size_is_not_opened() -> None:
    with worker(0, "p", 1 << 20) as prefill, worker(1, "d") as decode:
        rings, facts = PeerRings(decode.platform), facts_of(prefill.link)
        descriptors = len(os.listdir("/proc/self/fd"))
        for num_bytes in (-1, 0, 2**63):
            assert not rings.open(msgspec.structs.replace(facts, num_bytes=num_bytes))
        assert len(os.listdir("/proc/self/fd")) <= descriptors  # threads of other tests may still close some


def test_rings_of_engines_that_have_ended_are_closed_when_another_is_opened() -> None:
    """Nobody may ask the ended engine again, because its port is a free one. The device keeps its ring until then."""
    with worker(1, "d") as decode:
        rings = PeerRings(decode.platform)
        for _ in range(3):
            with worker(0, "p", 1 << 20) as prefill:
                assert rings.open(facts_of(prefill.link))
                assert decode.platform.num_opened == 1
        rings.close_all()
        assert decode.platform.num_opened == 0


def test_a_ring_does_not_take_the_place_of_another_one() -> None:
    """Another engine names the first one's ring, and a memory of its own."""
    with worker(0, "p", 1 << 20) as prefill, worker(1, "p", 1 << 19) as false, worker(2, "d") as decode:
        rings, facts = PeerRings(decode.platform), facts_of(prefill.link)
        assert rings.open(facts)
        assert not rings.open(msgspec.structs.replace(facts_of(false.link), ring_id=facts.ring_id))
        found = rings.find(facts.ring_id, 0, 10)
        assert found is not None and len(found.memory) == 1 << 20
        rings.close_all()


def test_the_device_has_its_memory_back_without_shared_memory_for_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(num_bytes: int) -> None:
        raise OSError("the system has no memory left")

    platform = LatePlatform(0)
    before = len(platform.shared)
    monkeypatch.setattr(SharedMemory, "new", refused)
    with pytest.raises(OSError, match="no memory left"):
        OwnRing(platform, 1000)
    assert len(platform.shared) == before
