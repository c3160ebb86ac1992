"""Fetches in a process of their own: they bring what fetches in threads bring, and end with either process."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from forkpoint.cache.peer_offers import Fetch, FetchReport
from forkpoint.cache.tier_entries import EntryName
from forkpoint.peer.fetch_child import Forget
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.peer.offered import OfferedEntry
from forkpoint.peer.process_fetching import ProcessFetching
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.pinned import PinnedBuffers
from forkpoint.shared_arrays import CAN_SHARE, Place, SharedMemory, place_of
from tests.peer.links import HOST, NAMES, SIZES, contents, facts

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="this system has no memory for several processes")


def order(link: PeerLink, lease: int) -> Fetch:
    """The order of all entries, under a ticket that is the lease's number."""
    return Fetch(lease, HOST, (link.facts.port,), "p", lease, NAMES, 30.0)


def offer(link: PeerLink, lease: int, count: int = len(NAMES)) -> None:
    for name in NAMES[:count]:
        link.offered.add([OfferedEntry(name, contents(name), is_copied=True)], lease)
    if count == len(NAMES):
        link.offered.complete(lease)


def next_report(fetching: ProcessFetching) -> FetchReport:
    report = fetching.next_report(20.0)
    assert report is not None, "nothing came in 20 s"
    return report


def wait_for_end(fetching: ProcessFetching) -> FetchReport:
    while not (report := next_report(fetching)).done and not report.failed:
        pass
    return report


def test_pickled_names_keep_every_field() -> None:
    """EntryName says itself what is pickled."""
    name = EntryName(*range(1, 1 + len(fields(EntryName))))  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(name)) == name


@pytest.mark.parametrize("shares", [True, False])
def test_a_prompt_arrives_and_its_memory_comes_back(prefill: PeerLink, fetching: ProcessFetching, shares: bool) -> None:
    fetching.shares_memory, given = shares, list[memoryview]()
    fetching.give = given.append
    lease = 10 + shares
    offer(prefill, lease)
    fetching.start(order(prefill, lease))
    assert wait_for_end(fetching).done == (lease,)
    assert [bytes(fetching.contents(lease, place)) for place in range(len(NAMES))] == [*map(contents, NAMES)]
    assert not given
    fetching.forget(lease)
    while len(given) < len(NAMES):
        assert fetching.next_report(0.01) is None
    assert not fetching._ordered and not fetching._written and not fetching._leaving


def test_entries_are_used_before_the_others_come(prefill: PeerLink, fetching: ProcessFetching) -> None:
    given, lease = list[memoryview](), 20
    fetching.give = given.append
    offer(prefill, lease, 2)
    fetching.start(order(prefill, lease))
    arrived = 0
    while arrived < 2:
        ((ticket, arrived),) = next_report(fetching).arrived
        assert ticket == lease
    assert bytes(fetching.contents(lease, 1)) == contents(NAMES[1])
    with pytest.raises(AssertionError, match="has not arrived"):
        fetching.contents(lease, 2)
    fetching.forget(lease)
    assert not given, "the process may still write there"
    while len(given) < len(NAMES):
        assert fetching.next_report(0.01) is None


def test_a_failure_is_logged_by_the_engine(
    prefill: PeerLink, fetching: ProcessFetching, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("forkpoint"), "propagate", True)
    fetching.start(Fetch(30, HOST, (prefill.facts.port,), "earlier", 30, NAMES, 30.0))
    assert wait_for_end(fetching).failed == (30,)
    assert "it has been restarted" in caplog.text


def test_a_killed_process_fails_its_fetches_alone(
    prefill: PeerLink, fetching: ProcessFetching, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("forkpoint"), "propagate", True)
    given = list[memoryview]()
    fetching.give = given.append
    offer(prefill, 40)
    fetching.start(order(prefill, 40))
    assert wait_for_end(fetching).done == (40,)
    fetching.start(order(prefill, 41))  # nothing is offered yet
    fetching.start(order(prefill, 42))
    fetching.forget(42)
    assert fetching._child is not None
    os.kill(fetching._child.process_id, signal.SIGKILL)
    assert wait_for_end(fetching).failed == (41,)
    assert caplog.text.count("has ended") == 1
    assert bytes(fetching.contents(40, 4)) == contents(NAMES[4]), "it had arrived"
    assert len(given) == len(NAMES), "those of the fetch that was forgotten"
    offer(prefill, 43)
    fetching.start(order(prefill, 43))
    assert wait_for_end(fetching).done == (43,)
    for ticket in (40, 41):
        fetching.forget(ticket)
    assert len(given) == 3 * len(NAMES)


def test_what_a_killed_process_has_reported_counts(prefill: PeerLink, fetching: ProcessFetching) -> None:
    offer(prefill, 51)
    fetching.start(order(prefill, 51))
    assert fetching._child is not None
    while 51 in prefill.offered._leases:  # the process ends the lease after its fetch
        time.sleep(0.01)
    time.sleep(0.1)  # for its report
    os.kill(fetching._child.process_id, signal.SIGKILL)
    assert wait_for_end(fetching).done == (51,)


def test_a_killed_process_does_not_confirm_what_has_arrived(prefill: PeerLink, fetching: ProcessFetching) -> None:
    """All entries are here, and the other engine may still find that they are wrong."""
    prefill.offered.add([OfferedEntry(name, contents(name), is_copied=True) for name in NAMES], 53)
    fetching.start(order(prefill, 53))
    while fetching._ordered[53].num_arrived < len(NAMES):
        fetching.next_report(1.0)
    assert fetching._child is not None
    os.kill(fetching._child.process_id, signal.SIGKILL)
    report = wait_for_end(fetching)
    assert (report.done, report.failed) == ((), (53,))


def test_a_path_that_is_no_text_is_left_out(prefill: PeerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself ignores such an entry."""
    monkeypatch.setattr(sys, "path", [Path("elsewhere"), *sys.path])
    with closing(open_link(facts(engine_id="d"), SIZES, 30.0, listens=False, fetches_apart=True)) as link:
        buffers = PinnedBuffers(CpuPlatform())
        link.use_buffers(buffers.take, buffers.give)
        assert isinstance(link.fetching, ProcessFetching)
        offer(prefill, 52)
        link.fetching.start(order(prefill, 52))
        assert wait_for_end(link.fetching).done == (52,)


def test_a_process_that_died_meanwhile_is_replaced(prefill: PeerLink, fetching: ProcessFetching) -> None:
    assert fetching._child is not None
    os.kill(fetching._child.process_id, signal.SIGKILL)
    fetching._child._process.wait()
    offer(prefill, 50)
    fetching.start(order(prefill, 50))
    assert wait_for_end(fetching).done == (50,)


def test_memory_that_cannot_be_opened_fails_one_fetch(
    prefill: PeerLink, fetching: ProcessFetching, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("forkpoint"), "propagate", True)
    given, is_gone = list[memoryview](), [True]
    fetching.give = given.append

    def elsewhere(array: np.ndarray) -> Place | None:
        place = place_of(array)
        return None if place is None else place._replace(inode=place.inode + is_gone[0])

    monkeypatch.setattr("forkpoint.peer.process_fetching.place_of", elsewhere)
    offer(prefill, 60)
    fetching.start(order(prefill, 60))
    assert wait_for_end(fetching).failed == (60,)
    assert "memory cannot be opened" in caplog.text
    fetching.forget(60)
    is_gone[0] = False
    fetching.start(replace(order(prefill, 60), ticket=61))
    assert wait_for_end(fetching).done == (61,)
    assert len(given) == len(NAMES)


def test_memory_that_is_not_shared_fails_one_fetch(
    prefill: PeerLink, fetching: ProcessFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(num_bytes: int) -> SharedMemory:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "new", refuse)
        fetching.start(order(prefill, 70))
        assert wait_for_end(fetching).failed == (70,)
    fetching.forget(70)
    offer(prefill, 71)
    fetching.start(order(prefill, 71))
    assert wait_for_end(fetching).done == (71,)


def test_fetches_that_nobody_wants_hold_no_memory(fetching: ProcessFetching) -> None:
    """A peer that does not answer keeps a thread busy, but nothing is written to the buffers."""
    given = list[memoryview]()
    fetching.give = given.append
    with socket.create_server((HOST, 0)) as silent:
        for ticket in range(100, 130):
            fetching.start(Fetch(ticket, HOST, (silent.getsockname()[1],), "p", ticket, NAMES, 30.0))
            fetching.forget(ticket)
        until_s = time.monotonic() + 10
        while len(given) < 30 * len(NAMES):
            assert time.monotonic() < until_s, f"{len(given)} buffers came back"
            fetching.next_report(0.01)


def test_nobody_waits_for_the_other_side_to_read(prefill: PeerLink, fetching: ProcessFetching) -> None:
    """A step may take seconds, in which the engine reads no report."""
    offer(prefill, 80)
    fetching.start(order(prefill, 80))
    assert wait_for_end(fetching).done == (80,)
    assert fetching._child is not None
    fetching._child.connection.send(Forget(10**6))
    for _ in range(4000):  # each answer takes about a hundred bytes, and the connection has room for some hundreds
        fetching._child.connection.send(Forget(10**6))
    offer(prefill, 81)
    fetching.start(order(prefill, 81))
    assert wait_for_end(fetching).done == (81,)


def test_waiting_for_no_fetch_takes_its_time(fetching: ProcessFetching) -> None:
    start_s = time.monotonic()
    assert fetching.next_report(0.05) is None
    assert time.monotonic() - start_s >= 0.05


def test_threads_may_forget_while_others_start(prefill: PeerLink, fetching: ProcessFetching) -> None:
    tickets = queue.SimpleQueue[int | None]()

    def forget() -> None:
        while (ticket := tickets.get()) is not None:
            fetching.forget(ticket)

    thread = threading.Thread(target=forget)
    thread.start()
    for ticket in range(1000, 1200):
        many = tuple(replace(NAMES[0], hash=number.to_bytes(16, "big")) for number in range(300))
        fetching.start(Fetch(ticket, HOST, (prefill.facts.port,), "earlier", ticket, many, 30.0))
        tickets.put(ticket)
        fetching.next_report()
    tickets.put(None)
    thread.join()
    offer(prefill, 90)
    fetching.start(order(prefill, 90))
    while not (report := next_report(fetching)).done:
        assert not {90} & {*report.failed}
    assert report.done == (90,)


def test_it_ends_with_the_engine(fetching: ProcessFetching) -> None:
    assert fetching._child is not None
    process_id = fetching._child.process_id
    fetching._child.connection.close()  # as the system does when the engine is killed
    until_s = time.monotonic() + 20
    while os.waitpid(process_id, os.WNOHANG) == (0, 0):
        assert time.monotonic() < until_s, "it runs on"
        time.sleep(0.01)


def test_it_ends_with_the_engine_although_a_fork_of_it_lives() -> None:
    """The fork holds the engine's end of the connection open."""
    engine_runs = """
import os, time
from forkpoint.peer.process_fetching import ProcessFetching
fetching, is_child = ProcessFetching(b"n" * 16, {}), not os.fork()
if not is_child:
    print(fetching._child.process_id, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", engine_runs], stdout=subprocess.PIPE, start_new_session=True
    ) as engine:
        try:
            assert engine.stdout is not None
            process_id = int(engine.stdout.readline())
            engine.kill()
            engine.wait()
            status, until_s = Path(f"/proc/{process_id}/stat"), time.monotonic() + 20
            while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
                assert time.monotonic() < until_s, "it runs on"
                time.sleep(0.01)
        finally:
            os.killpg(engine.pid, signal.SIGKILL)  # the fork, too
