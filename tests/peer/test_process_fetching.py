"""Fetches in a process of their own: they bring what fetches in threads bring, and end with either process."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from forkpoint.cache.peer_offers import Fetch, FetchNews
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.peer.process_fetching import ProcessFetching
from forkpoint.runtime.pinned import PinnedBuffers
from forkpoint.shared_arrays import CAN_SHARE
from tests.peer.test_link import HOST, NAMES, SIZES, contents, facts

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="this system has no memory for several processes")


@pytest.fixture(scope="module")
def prefill() -> Iterator[PeerLink]:
    with closing(open_link(facts(), SIZES, 3600.0, listens=True)) as link:
        yield link


@pytest.fixture
def fetching() -> Iterator[ProcessFetching]:
    with closing(open_link(facts(engine_id="d"), SIZES, 30.0, listens=False, fetches_apart=True)) as link:
        buffers = PinnedBuffers()
        link.use_buffers(buffers.take, buffers.give)
        assert isinstance(link.fetching, ProcessFetching)
        yield link.fetching


def order(link: PeerLink, lease: int) -> Fetch:
    """The order of all entries, under a ticket that is the lease's number."""
    return Fetch(lease, HOST, (link.facts.port,), "p", lease, NAMES, 30.0)


def offer(link: PeerLink, lease: int, count: int = len(NAMES)) -> None:
    for name in NAMES[:count]:
        link.offered.add(name, contents(name), lease)


def next_news(fetching: ProcessFetching) -> FetchNews:
    news = fetching.news(20.0)
    assert news is not None, "nothing came in 20 s"
    return news


def wait_for_end(fetching: ProcessFetching) -> FetchNews:
    while not (news := next_news(fetching)).done and not news.failed:
        pass
    return news


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
        assert fetching.news(0.01) is None
    assert not fetching._entries and not fetching._written and not fetching._leaving


def test_entries_are_used_before_the_others_come(prefill: PeerLink, fetching: ProcessFetching) -> None:
    given, lease = list[memoryview](), 20
    fetching.give = given.append
    offer(prefill, lease, 2)
    fetching.start(order(prefill, lease))
    arrived = 0
    while arrived < 2:
        ((ticket, arrived),) = next_news(fetching).arrived
        assert ticket == lease
    assert bytes(fetching.contents(lease, 1)) == contents(NAMES[1])
    with pytest.raises(AssertionError, match="has not arrived"):
        fetching.contents(lease, 2)
    fetching.forget(lease)
    assert not given, "the process may still write there"
    while len(given) < len(NAMES):
        assert fetching.news(0.01) is None


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


def test_it_ends_with_the_engine(fetching: ProcessFetching) -> None:
    assert fetching._child is not None
    process_id = fetching._child.process_id
    fetching._child.connection.close()  # as the system does when the engine is killed
    until_s = time.monotonic() + 20
    while os.waitpid(process_id, os.WNOHANG) == (0, 0):
        assert time.monotonic() < until_s, "it runs on"
        time.sleep(0.01)
