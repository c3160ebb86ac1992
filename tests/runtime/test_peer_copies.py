"""Copies between a device and its link to other engines."""

from __future__ import annotations

import threading

import pytest

from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.cache.tier_entries import BLOCK, SLOT
from forkpoint.peer.link import open_link
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.pinned import as_tensor
from forkpoint.runtime.units import unit_bytes, unit_extent
from forkpoint.sched.plan import Move, MoveKind, MoveRoute
from tests.late_streams import LatePlatform
from tests.sched.harness import LAYOUTS


def test_a_fetched_unit_stays_in_its_buffer_until_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nobody wants it any more: others would fill the buffer while it is read."""
    layout, platform = LAYOUTS["one each"], LatePlatform(0, chance=0.0)
    arena = ArenaBuffer(layout, 8, platform)
    sizes = {BLOCK: unit_bytes(layout, MoveKind.BLOCK), SLOT: unit_bytes(layout, MoveKind.SLOT)}
    link = open_link(PeerFacts(b"n" * 16, "d", "127.0.0.1", 0, (), 10**6, 5.0), sizes, 30.0, listens=False)
    arena.use_peers(link)
    buffer, given = link.fetching.take(sizes[BLOCK]), threading.Event()
    as_tensor(buffer).fill_(7)
    monkeypatch.setattr(link.fetching, "give", lambda _: given.set())
    link.fetching._entries[1] = [buffer]
    arena.move([Move(MoveKind.BLOCK, 0, 1, MoveRoute.STAGE, 9), Move(MoveKind.BLOCK, 0, 0, MoveRoute.FORGET, 1)])
    assert not given.wait(0.2), "the stream has not read it"
    assert arena.next_report() is None
    platform.synchronize()
    assert given.wait(20)
    report = arena.next_report()
    assert report is not None and report.done == (9,)
    arena.move([Move(MoveKind.BLOCK, 0, 3, MoveRoute.LAND, 9)])
    start = unit_extent(layout, MoveKind.BLOCK, 3).start
    assert (arena.data[start : start + sizes[BLOCK]] == 7).all()
    arena.close()
