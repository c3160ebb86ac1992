"""Two links over a socket: what arrives is right or fails, whatever the other side sends."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from forkpoint.cache.disk_entries import BLOCK, SLOT, EntryName
from forkpoint.cache.peer_offers import Fetch, FetchNews, PeerFacts
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.peer.protocol import HEAD, MAGIC, MAX_MESSAGE_BYTES, HeldEntries, Line, PeerError, WantedEntries
from forkpoint.peer.server import MAX_CONNECTIONS

SIZES = {BLOCK: 700, SLOT: 3000}
NAMES = (*(EntryName(BLOCK, bytes([i]) * 16, bytes([i - 1]) * 16, i) for i in range(1, 5)),)
NAMES = (*NAMES, EntryName(SLOT, bytes([4]) * 16, bytes([3]) * 16, 4, 1, True))
HOST = "127.0.0.1"


def facts(namespace: bytes = b"n" * 16, engine_id: str = "p") -> PeerFacts:
    return PeerFacts(namespace, engine_id, HOST, 0, ("loopback",), 10**6, 5.0)


def contents(name: EntryName) -> bytes:
    return random.Random(name.depth * 10 + name.kind).randbytes(SIZES[name.kind])


@pytest.fixture(scope="module")
def prefill() -> Iterator[PeerLink]:
    link = open_link(facts(), SIZES, 3600.0, listens=True)
    yield link
    link.close()


@pytest.fixture
def decode() -> Iterator[PeerLink]:
    link = open_link(facts(engine_id="d"), SIZES, 30.0, listens=False)
    yield link
    link.close()


LEASES = iter(range(1, 10**6))


def offer(link: PeerLink) -> int:
    lease = next(LEASES)
    for name in NAMES:
        link.offer(name, memoryview(contents(name)), lease)
    return lease


def fetch(link: PeerLink, port: int, lease: int, names: tuple[EntryName, ...] = NAMES, engine_id: str = "p") -> bool:
    """Fetch and return whether it succeeded. What arrives has to be right."""
    link.fetching.start(Fetch(1, HOST, port, engine_id, lease, names, 5.0))
    news: FetchNews | None = None
    while news is None:
        news = link.fetching.news(10.0)
    if news.failed:
        return False
    for place, name in enumerate(names):
        target = bytearray(SIZES[name.kind])
        link.fetching.take(1, place, memoryview(target))
        assert target == contents(name), "another engine's bytes passed the check"
    link.fetching.forget(1)
    return True


def test_a_prompt_is_fetched_once(prefill: PeerLink, decode: PeerLink) -> None:
    lease, port = offer(prefill), prefill.facts.port
    assert fetch(decode, port, lease)
    assert not fetch(decode, port, lease), "its lease has ended"


def test_others_are_refused(prefill: PeerLink, decode: PeerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.peer.server.COPIES_WAIT_S", 0.1)
    lease, port = offer(prefill), prefill.facts.port
    assert not fetch(decode, port, lease, engine_id="an earlier start")
    other = open_link(facts(b"o" * 16, "d"), SIZES, 30.0, listens=False)
    assert not fetch(other, port, lease)
    other.close()
    assert not fetch(decode, port, lease, (*NAMES[:2], EntryName(SLOT, bytes(16), bytes(16), 2)))
    assert not fetch(decode, port, offer(prefill), (*NAMES[:2], EntryName(BLOCK, bytes([3]) * 16, bytes(16), 3))), (
        "the name is a part of the checksum"
    )
    assert fetch(decode, port, offer(prefill))


def test_messages_are_checked_before_they_are_read(prefill: PeerLink) -> None:
    def line() -> Line:
        return Line(socket.create_connection((HOST, prefill.facts.port)), time.monotonic() + 10)

    for wanted, says in (
        (WantedEntries(b"o" * 16, "p", 1, (b"",)), "another model"),
        (WantedEntries(b"n" * 16, "earlier", 1, (b"",)), "restarted"),
        (WantedEntries(b"n" * 16, "p", next(LEASES), ()), ""),
    ):
        asking = line()
        asking.send(wanted)
        if says:
            assert says in asking.receive(HeldEntries).refusal
    near, far = socket.socketpair()
    with near, far:
        near.sendall(HEAD.pack(MAGIC, MAX_MESSAGE_BYTES + 1))
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerError, match="does not speak"):
            Line(far, time.monotonic() + 10).receive(HeldEntries)


def recorded(prefill: PeerLink, decode: PeerLink) -> bytes:
    """Return all that a prefill engine sends for one fetch."""
    found = bytearray()
    with socket.create_server((HOST, 0)) as listener:

        def pass_on() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection((HOST, prefill.facts.port)) as far:
                far.sendall(near.recv(10**5))
                while len(found) < sum(SIZES[name.kind] for name in NAMES) + 20:
                    data = far.recv(10**5)
                    found.extend(data)
                    near.sendall(data)
                near.recv(1)

        thread = threading.Thread(target=pass_on)
        thread.start()
        assert fetch(decode, listener.getsockname()[1], offer(prefill))
        thread.join()
    return bytes(found)


def damaged(data: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.choices(range(len(data)), k=2))
    if rng.random() < 0.5:
        start = rng.randrange(120)  # in the messages
    kind = rng.randrange(4)
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + bytes([data[start] ^ (1 << rng.randrange(8))]) + data[start + 1 :]
    if kind == 2:
        return data[:start] + rng.randbytes(max(1, end - start)) + data[max(end, start + 1) :]
    return data[:start] + data[end:]


def test_no_damage_passes(prefill: PeerLink, decode: PeerLink) -> None:
    sent, rng = recorded(prefill, decode), random.Random(0)
    with socket.create_server((HOST, 0)) as listener:
        answers: list[bytes] = []

        def serve() -> None:
            while True:
                near, _ = listener.accept()
                with near:
                    near.recv(10**5)
                    if not answers:
                        return
                    near.sendall(answers[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        for _ in range(300):
            answer = damaged(sent, rng)
            answers.append(answer)
            done = fetch(decode, listener.getsockname()[1], 1)
            assert not done or answer.startswith(sent), "damage was taken"
        answers.clear()
        socket.create_connection(listener.getsockname()).close()
        thread.join()


def test_connections_that_say_nothing_are_bounded(prefill: PeerLink, decode: PeerLink) -> None:
    port = prefill.facts.port
    idle = [socket.create_connection((HOST, port)) for _ in range(MAX_CONNECTIONS + 8)]
    for each in idle[MAX_CONNECTIONS:]:
        each.settimeout(20)
        assert each.recv(1) == b"", "closed at once"
    garbage = [b"", b"GET / HTTP/1.1\r\n\r\n", b"FKP1\xff\xff\xff\xff", b"FKP1\x03\x00\x00\x00abc"]
    for number, each in enumerate(idle[:MAX_CONNECTIONS]):
        each.sendall(garbage[number % len(garbage)])
        each.close()
    lease, until = offer(prefill), time.monotonic() + 20
    while not fetch(decode, port, lease):
        assert time.monotonic() < until, "it serves others again"
