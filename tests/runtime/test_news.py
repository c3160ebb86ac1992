"""A step without work sleeps until a tier or a fetch has news, so that other threads get the interpreter."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from forkpoint.cache.disk_entries import TierNews
from forkpoint.cache.peer_offers import FetchNews
from forkpoint.runtime.buffers import ArenaBuffer
from tests.sched.harness import LAYOUTS


class Fetches:
    """Fetches that end when `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.num_looks = 0

    def news(self, wait_s: float = 0.0) -> FetchNews | None:
        self.num_looks += 1
        return FetchNews((1,)) if self.ended.wait(wait_s) else None


@pytest.fixture
def arena() -> ArenaBuffer:
    arena = ArenaBuffer(LAYOUTS["one each"], 2)
    arena.peers = SimpleNamespace(fetching=Fetches())  # type: ignore[assignment]
    return arena


def test_a_step_without_work_waits_for_fetches(arena: ArenaBuffer) -> None:
    fetches = arena.peers.fetching  # type: ignore[union-attr]
    assert arena.all_news(0.02) == (None, None)
    assert fetches.num_looks <= 50, "it looked without a pause"
    threading.Timer(0.01, fetches.ended.set).start()
    assert arena.all_news(20.0) == (None, FetchNews((1,)))


def test_news_of_both_are_reported(arena: ArenaBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "news", lambda wait_s=0.0: TierNews((2,)))
    assert arena.all_news(20.0) == (TierNews((2,)), None)
    arena.peers.fetching.ended.set()  # type: ignore[union-attr]
    assert arena.all_news() == (TierNews((2,)), FetchNews((1,)))
    arena.peers = None
    assert arena.all_news() == (TierNews((2,)), None)
