"""Peers that do not answer, or stop: fetches from them end, and others go on."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from forkpoint.cache.peer_offers import Fetch
from forkpoint.peer.link import PeerLink
from forkpoint.peer.offered import OfferedEntry
from forkpoint.peer.protocol import HEAD, MAGIC, SENT, SILENCE_S, PartHead
from tests.peer.links import HOST, LEASES, NAMES, contents, fetch, offer

AGREES = HEAD.pack(MAGIC, 2) + b"\x91\xa0"  # HeldEntries without a refusal


def test_a_fetch_that_nobody_wants_ends_at_once(prefill: PeerLink, decode: PeerLink) -> None:
    fetching, lease = decode.fetching, next(LEASES)
    fetching.start(Fetch(1, HOST, (prefill.facts.port,), "p", lease, NAMES, 3600.0))  # it has not been offered
    until = time.monotonic() + 20
    while not fetching._running[1]._lines:
        assert time.monotonic() < until
        time.sleep(0.001)
    fetching.forget(1)
    with fetching._changed:
        assert fetching._changed.wait_for(lambda: not fetching._running, 5)
    assert fetching.next_report() is None


@pytest.mark.parametrize("sent", [b"", AGREES, AGREES + PartHead(SENT, bytes(16)).pack() + b"some"], ids=len)
def test_a_peer_that_has_stopped_is_given_up(decode: PeerLink, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said nothing, or stopped before an entry or in one. A prompt may take long, but not without a word."""
    monkeypatch.setattr("forkpoint.peer.fetching.SILENCE_S", 0.2)
    with socket.create_server((HOST, 0)) as listener:
        decode.fetching.start(Fetch(1, HOST, (listener.getsockname()[1],), "p", 1, NAMES, 3600.0))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(sent)
            report = decode.fetching.next_report(20.0)
    assert report is not None and report.failed == report.unreachable == (1,)


def test_a_peer_that_runs_is_not_silent_for_that_long(
    prefill: PeerLink, decode: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for an entry and then for the copy of its bytes: both together end before the other engine gives up."""
    offered, waited, limits = prefill.offered, [0.0], list[float]()
    wait_for, wait_for_copy = offered.wait_for, offered.wait_for_copy

    def late(lease: int, keys: Sequence[bytes], wait_s: float) -> list[OfferedEntry]:
        waited[0] += wait_s
        return wait_for(lease, keys, wait_s)

    def copied(entry: OfferedEntry, wait_s: float) -> bool:
        limits.append(waited[0] + wait_s)
        waited[0] = 0.0  # bytes follow
        return wait_for_copy(entry, wait_s)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + waited[0])
    monkeypatch.setattr("forkpoint.peer.server.time", clock)
    monkeypatch.setattr(offered, "wait_for", late)
    monkeypatch.setattr(offered, "wait_for_copy", copied)
    assert fetch(decode, prefill.facts.port, offer(prefill))
    assert len(limits) == len(NAMES) and max(limits) < SILENCE_S


@pytest.fixture
def silent_port() -> Iterator[int]:
    """The port of a full queue of connections. It drops further ones, as a machine does that is gone."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(4):
            queued = opened.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_machine_that_does_not_answer_is_given_up(
    decode: PeerLink, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkpoint.peer.fetching.SILENCE_S", 0.2)
    decode.fetching.start(Fetch(1, HOST, (silent_port,), "p", 1, NAMES, 3600.0))
    report = decode.fetching.next_report(20.0)
    assert report is not None and report.failed == report.unreachable == (1,)


def test_a_machine_that_does_not_answer_delays_no_other(
    prefill: PeerLink, decode: PeerLink, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches that are wanted, fetches that nobody wants, and ends of leases wait for it."""
    monkeypatch.setattr("forkpoint.peer.fetching.BYTES_OF_CONNECTION", 1000)
    monkeypatch.setattr("forkpoint.peer.fetching.os.cpu_count", lambda: 16)
    for ticket in range(100, 140):
        decode.fetching.start(Fetch(ticket, HOST, (silent_port,), "p", ticket, NAMES, 3600.0))
        if ticket % 2:
            decode.fetching.forget(ticket)
        decode.fetching.start(Fetch(0, HOST, (silent_port,), "p", ticket, (), 3600.0))
    before_s = time.monotonic()
    assert fetch(decode, prefill.facts.port, offer(prefill))
    assert time.monotonic() - before_s < 5, "the other fetches take 15 s"


def test_a_peer_that_says_nothing_is_given_up(decode: PeerLink) -> None:
    with socket.create_server((HOST, 0)) as listener:
        decode.fetching.start(Fetch(1, HOST, (listener.getsockname()[1],), "p", 1, NAMES, 0.2))
        report = decode.fetching.next_report(5.0)
    assert report is not None and report.failed == report.unreachable == (1,)


def test_a_peer_that_sends_too_slowly_has_answered(prefill: PeerLink, decode: PeerLink) -> None:
    """Its prompt is late, but its other prompts may come in time."""
    fetching, lease = decode.fetching, next(LEASES)
    prefill.offered.add(
        [OfferedEntry(NAMES[0], contents(NAMES[0]), is_copied=True)], lease
    )  # the others are still computed
    fetching.start(Fetch(1, HOST, (prefill.facts.port,), "p", lease, NAMES, 0.5))
    report = fetching.next_report(5.0)
    while report is None or not report.failed:
        assert report is None or report.arrived == ((1, 1),)
        report = fetching.next_report(5.0)
    assert report.failed == (1,) and not report.unreachable
