"""A step without work sleeps until a tier or a fetch reports something, so that other threads get the interpreter."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from forkpoint.cache.peer_offers import FetchReport
from forkpoint.cache.tier_entries import TierReport
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.buffers import ArenaBuffer
from tests.sched.harness import LAYOUTS


class Fetches:
    """Fetches that end when `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.num_looks = 0

    def next_report(self, wait_s: float = 0.0) -> FetchReport | None:
        self.num_looks += 1
        return FetchReport((1,)) if self.ended.wait(wait_s) else None


@pytest.fixture
def arena() -> ArenaBuffer:
    arena = ArenaBuffer(LAYOUTS["one each"], 2, CpuPlatform())
    arena.peers = SimpleNamespace(fetching=Fetches())  # type: ignore[assignment]
    return arena


def test_a_step_without_work_waits_for_fetches(arena: ArenaBuffer) -> None:
    fetches = arena.peers.fetching  # type: ignore[union-attr]
    assert arena.next_reports(0.02) == (None, None)
    assert fetches.num_looks <= 50, "it looked without a pause"
    threading.Timer(0.01, fetches.ended.set).start()
    assert arena.next_reports(20.0) == (None, FetchReport((1,)))


def test_both_report(arena: ArenaBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "next_report", lambda wait_s=0.0: TierReport((2,)))
    assert arena.next_reports(20.0) == (TierReport((2,)), None)
    arena.peers.fetching.ended.set()  # type: ignore[union-attr]
    assert arena.next_reports() == (TierReport((2,)), FetchReport((1,)))
    arena.peers = None
    assert arena.next_reports() == (TierReport((2,)), None)
