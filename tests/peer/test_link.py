"""Two links over a socket: what arrives is right or fails, whatever the other side sends."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from forkpoint.cache.peer_offers import Fetch
from forkpoint.cache.tier_entries import BLOCK, SLOT, EntryName
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.peer.offered import OfferedEntry, key_of
from forkpoint.peer.protocol import (
    HEAD,
    MAGIC,
    MAX_MESSAGE_BYTES,
    PART,
    HeldEntries,
    Line,
    PeerError,
    WantedEntries,
    num_parts,
    part_start,
    part_sum,
)
from forkpoint.peer.server import MAX_CONNECTIONS
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.pinned import SEGMENT_BYTES, PinnedBuffers
from tests.peer.links import HOST, HOST_V6, LEASES, NAMES, SIZES, contents, facts, fetch, offer


def test_a_prompt_is_fetched_once(prefill: PeerLink, decode: PeerLink) -> None:
    lease, port = offer(prefill), prefill.facts.port
    assert fetch(decode, port, lease)
    with prefill.offered._changed:  # a message of its own ends the lease
        assert prefill.offered._changed.wait_for(lambda: lease in prefill.offered._ended, 20)
    assert not fetch(decode, port, lease), "its lease has ended"


def has_ipv6() -> bool:
    try:
        with socket.create_server((HOST_V6, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_prompt_is_fetched_over_ipv6(decode: PeerLink) -> None:
    with contextlib.closing(open_link(replace(facts(), host=HOST_V6), SIZES, 3600.0, listens=True)) as link:
        assert fetch(decode, link.facts.port, offer(link), host=HOST_V6)


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
    found, held = bytearray(), HEAD.size + len(msgspec.msgpack.encode(HeldEntries()))
    num_bytes = held + sum(PART.size + SIZES[name.kind] for name in NAMES) + PART.size  # the last head, too
    with socket.create_server((HOST, 0)) as listener:

        def pass_on() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection((HOST, prefill.facts.port)) as far:
                far.sendall(near.recv(10**5))
                while len(found) < num_bytes:
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
                    if not near.recv(10**5):
                        return
                    with contextlib.suppress(OSError):  # it only ends its lease
                        near.sendall(answers[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        for _ in range(300):
            answer = damaged(sent, rng)
            answers.append(answer)
            done = fetch(decode, listener.getsockname()[1], 1)
            assert not done or answer.startswith(sent), "damage was taken"
        socket.create_connection(listener.getsockname()).close()
        thread.join()


def test_connections_that_say_nothing_are_bounded(prefill: PeerLink, decode: PeerLink) -> None:
    port = prefill.facts.port
    idle = [socket.create_connection((HOST, port)) for _ in range(MAX_CONNECTIONS + 8)]
    for each in idle[MAX_CONNECTIONS:]:
        each.settimeout(20)
        assert each.recv(1) == b"", "closed at once"
    garbage = [b"", b"GET / HTTP/1.1\r\n\r\n", b"FKP5\xff\xff\xff\xff", b"FKP3\x03\x00\x00\x00abc"]
    for number, each in enumerate(idle[:MAX_CONNECTIONS]):
        each.sendall(garbage[number % len(garbage)])
        each.close()
    lease, until = offer(prefill), time.monotonic() + 20
    while not fetch(decode, port, lease):
        assert time.monotonic() < until, "it serves others again"


def test_a_server_without_threads_serves_others_later(
    prefill: PeerLink, decode: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread, start: Callable[..., None] = threading.Thread.start) -> None:
        if thread.name == "offer":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(MAX_CONNECTIONS + 1):
            with socket.create_connection((HOST, prefill.facts.port), 5) as refused:
                assert refused.recv(1) == b"", "closed at once"
    assert fetch(decode, prefill.facts.port, offer(prefill))


def test_a_server_without_files_waits_for_some(
    prefill: PeerLink, decode: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trying again at once would take the interpreter from the engine's steps."""
    times_s = list[float]()

    def refuse(listener: socket.socket) -> None:
        times_s.append(time.monotonic())
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", refuse)
        socket.create_connection((HOST, prefill.facts.port)).close()  # ends the call that waits
        until_s = time.monotonic() + 20
        while len(times_s) < 4:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    assert times_s[3] - times_s[0] > 0.2
    assert fetch(decode, prefill.facts.port, offer(prefill))


@pytest.fixture
def sharing() -> Iterator[tuple[PeerLink, PinnedBuffers]]:
    """A prefill engine on the same machine, whose offers are in shared memory."""
    link, buffers = open_link(facts(), SIZES, 3600.0, listens=True), PinnedBuffers(CpuPlatform())
    link.use_buffers(buffers.take, buffers.give)
    yield link, buffers
    link.close()


def share(sharing: tuple[PeerLink, PinnedBuffers]) -> tuple[int, list[memoryview]]:
    """Offer all entries from shared memory. Return their lease and their memory."""
    (link, buffers), lease, held = sharing, next(LEASES), list[memoryview]()
    with link.offered._changed:  # prompts share entries, so the lease before has to end
        assert link.offered._changed.wait_for(lambda: not link.offered._entries, 10)
    for name in NAMES:
        held.append(buffers.take(SIZES[name.kind]))
        held[-1][:] = contents(name)
        link.offered.add([OfferedEntry(name, held[-1], is_copied=True)], lease)
    link.offered.complete(lease)
    for name in NAMES:
        [entry] = link.offered.wait_for(lease, [key_of(name)], 0)
        for part in range(num_parts(SIZES[name.kind])):
            link.offered.part_sum(entry, part)  # as they are before a test changes them
        link.offered.sent([entry])
    return lease, held


def test_entries_are_read_from_shared_memory(
    sharing: tuple[PeerLink, PinnedBuffers], decode: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _ = sharing
    port = link.facts.port
    with monkeypatch.context() as patch:
        patch.setattr(Line, "receive_into", small_only(Line.receive_into))
        assert fetch(decode, port, share(sharing)[0]), "no contents came over the connection"
    lease, held = share(sharing)
    held[1][5] ^= 1
    assert not fetch(decode, port, lease), "its memory has changed"
    lease, held = share(sharing)
    for entry in link.offered._leases[lease].entries.values():
        assert entry.place is not None
        entry.place = entry.place._replace(inode=1)
    assert fetch(decode, port, lease), "memory that cannot be read is sent"
    lease, held = share(sharing)
    for entry in link.offered._leases[lease].entries.values():
        assert entry.place is not None
        entry.place = entry.place._replace(offset=SEGMENT_BYTES - 1)
    assert fetch(decode, port, lease), "memory that ends too early is sent"


def small_only(receive_into: Callable[[Line, memoryview], None]) -> Callable[[Line, memoryview], None]:
    def checked(line: Line, view: memoryview) -> None:
        assert len(view) < SIZES[BLOCK], "an entry was sent"
        receive_into(line, view)

    return checked


@pytest.mark.parametrize("shares", [True, False])
def test_a_large_prompt_comes_over_several_connections(
    sharing: tuple[PeerLink, PinnedBuffers], decode: PeerLink, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    monkeypatch.setattr(decode.fetching, "shares_memory", shares)
    monkeypatch.setattr("forkpoint.peer.fetching.BYTES_OF_CONNECTION", 1000)
    monkeypatch.setattr("forkpoint.peer.protocol.PART_BYTES", 450)  # blocks have two parts, states seven
    monkeypatch.setattr("forkpoint.peer.fetching.os.cpu_count", lambda: 16)
    lines, asked = list[Line](), list[WantedEntries]()

    def note(line: Line, message: Any, send: Callable[..., None] = Line.send) -> None:
        lines.append(line)
        asked.extend([message] if isinstance(message, WantedEntries) else [])
        send(line, message)

    monkeypatch.setattr(Line, "send", note)
    assert fetch(decode, sharing[0].facts.port, share(sharing)[0])
    assert len(set(map(id, lines))) >= 5 and decode.fetching._running == {}
    parts = sum(num_parts(SIZES[name.kind]) for name in NAMES)
    assert parts == 15 and sum(len(line.keys) for line in asked) == parts
    assert max(len(line.keys) for line in asked) <= parts // 5 + 1, "each connection has its share of the state too"
    lease, held = share(sharing)
    held[-1][0] ^= 1  # one part fails, and ends the others
    assert not fetch(decode, sharing[0].facts.port, lease)


@pytest.mark.parametrize("starts", ["fetching.ThreadPoolExecutor.submit", "peer_threads.Thread"])
def test_a_fetch_without_threads_fails(
    sharing: tuple[PeerLink, PinnedBuffers], decode: PeerLink, monkeypatch: pytest.MonkeyPatch, starts: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("forkpoint.peer.fetching.BYTES_OF_CONNECTION", 1000)
    monkeypatch.setattr("forkpoint.peer.fetching.os.cpu_count", lambda: 16)
    lease, _ = share(sharing)
    with monkeypatch.context() as patch:
        patch.setattr(f"forkpoint.peer.{starts}", refuse)
        assert not fetch(decode, sharing[0].facts.port, lease)
        decode.fetching.start(Fetch(0, HOST, (sharing[0].facts.port,), "p", lease, (), 3600.0))  # ends a lease
    sharing[0].offered.end(lease)
    assert fetch(decode, sharing[0].facts.port, share(sharing)[0])


def test_entries_are_used_before_the_others_come(
    sharing: tuple[PeerLink, PinnedBuffers], decode: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay as they are until the scheduler forgets the fetch, although it fails."""
    (link, _), fetching, given, lease = sharing, decode.fetching, list[memoryview](), next(LEASES)
    monkeypatch.setattr("forkpoint.peer.fetching.PROGRESS_BYTES", 2 * SIZES[BLOCK])
    fetching.give = given.append
    fetching.start(Fetch(1, HOST, (link.facts.port,), "p", lease, NAMES, 3600.0))
    for end in (2, 4):
        for name in NAMES[end - 2 : end]:
            link.offered.add([OfferedEntry(name, contents(name), is_copied=True)], lease)
        report = fetching.next_report(20.0)
        assert report is not None and report.arrived == ((1, end),) and not report.done, "it wakes up for two blocks"
        assert fetching.next_report() is None, "nothing is reported twice"
        for place in range(end):
            assert fetching.contents(1, place) == contents(NAMES[place])
    with pytest.raises(AssertionError, match="has not arrived"):
        fetching.contents(1, 4)
    link.offered.end(lease)
    report = fetching.next_report(20.0)
    assert report is not None and report.failed == (1,) and not report.arrived and not given
    assert fetching.contents(1, 3) == contents(NAMES[3])
    fetching.forget(1)
    assert len(given) >= 4


@pytest.mark.parametrize("is_right", [True, False])
def test_a_fetch_ends_when_its_prompt_is_known_to_be_right(prefill: PeerLink, decode: PeerLink, is_right: bool) -> None:
    """The other engine offers entries before that."""
    fetching, lease = decode.fetching, next(LEASES)
    prefill.offered.add([OfferedEntry(name, contents(name), is_copied=True) for name in NAMES], lease)
    fetching.start(Fetch(1, HOST, (prefill.facts.port,), "p", lease, NAMES, 30.0))
    arrived = 0
    while arrived < len(NAMES):
        report = fetching.next_report(1.0)
        assert report is None or not (report.done or report.failed)
        arrived = arrived if report is None else report.arrived[0][1]
    assert fetching.next_report() is None
    if is_right:
        prefill.offered.complete(lease)
    else:
        prefill.offered.withdraw(NAMES[0].hash)
    report = fetching.next_report(20.0)
    assert report is not None and (report.done, report.failed) == (((1,), ()) if is_right else ((), (1,)))
    assert not report.unreachable
    fetching.forget(1)


def test_bytes_are_sent_once_they_have_come_from_the_device(prefill: PeerLink, decode: PeerLink) -> None:
    fetching, lease = decode.fetching, next(LEASES)
    data = [memoryview(bytearray(SIZES[name.kind])) for name in NAMES]
    entries = [OfferedEntry(name, each) for name, each in zip(NAMES, data, strict=True)]
    prefill.offered.add(entries, lease)
    prefill.offered.complete(lease)
    fetching.start(Fetch(1, HOST, (prefill.facts.port,), "p", lease, NAMES, 30.0))
    assert fetching.next_report(0.2) is None
    for name, each in zip(NAMES, data, strict=True):
        each[:] = contents(name)
    prefill.offered.copied(entries)
    report = fetching.next_report(5.0)
    assert report is not None and report.done == (1,)
    assert [bytes(fetching.contents(1, place)) for place in range(len(NAMES))] == [contents(name) for name in NAMES]
    fetching.forget(1)


def test_what_has_arrived_is_not_fetched_again(
    sharing: tuple[PeerLink, PinnedBuffers], decode: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without the other's memory asks again for the rest alone: the first entries may be in use."""
    lease, _ = share(sharing)
    entries = list(sharing[0].offered._leases[lease].entries.values())
    assert entries[2].place is not None
    entries[2].place = entries[2].place._replace(inode=1)
    asked = list[WantedEntries]()
    monkeypatch.setattr(
        Line, "send", lambda line, message, send=Line.send: (asked.append(message), send(line, message))
    )
    assert fetch(decode, sharing[0].facts.port, lease)
    assert [len(wanted.keys) for wanted in asked if isinstance(wanted, WantedEntries) and wanted.keys] == [5, 3]


def test_parts_do_not_pass_for_each_other(prefill: PeerLink, decode: PeerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.peer.protocol.PART_BYTES", 350)
    lease = offer(prefill)
    with monkeypatch.context() as patch:
        patch.setattr("forkpoint.peer.server.part_of", lambda data, part: data[part_start(part ^ 1) :][:350])
        patch.setattr("forkpoint.peer.offered.part_of", lambda data, part: data[part_start(part ^ 1) :][:350])
        patch.setattr("forkpoint.peer.offered.part_sum", lambda n, name, part, data: part_sum(n, name, part ^ 1, data))
        assert not fetch(decode, prefill.facts.port, lease, NAMES[:4]), "the parts of each block were swapped"
    asking = Line(socket.create_connection((HOST, prefill.facts.port)), time.monotonic() + 10)
    key = key_of(NAMES[0]) + (2).to_bytes(4, "little")
    asking.send(WantedEntries(b"n" * 16, "p", offer(prefill), (key,)))
    assert not asking.receive(HeldEntries).refusal
    with pytest.raises(PeerError, match="ended the connection"):
        asking.receive_head()
