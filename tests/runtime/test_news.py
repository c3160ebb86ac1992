"""A step without work sleeps until a tier or a fetch has news, so that other threads get the interpreter."""

from __future__ import annotations

import threading

import pytest

from forkpoint.cache.disk_entries import TierNews
from forkpoint.cache.peer_offers import FetchNews
from forkpoint.runtime.news import NewsOfCopies


class Fetches:
    """Fetches that end when `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.num_looks = 0

    def news(self, wait_s: float = 0.0) -> FetchNews | None:
        self.num_looks += 1
        return FetchNews((1,)) if self.ended.wait(wait_s) else None


@pytest.mark.parametrize("has_tiers", [False, True])
def test_a_step_without_work_waits_for_fetches(has_tiers: bool) -> None:
    fetches = Fetches()
    tiers = (lambda wait_s: None) if has_tiers else None  # as streams do while nothing is being loaded
    reading = NewsOfCopies(tiers, fetches, wait_s=0.02)
    assert reading.read() == (None, None)
    assert fetches.num_looks <= 50, "it looked without a pause"
    threading.Timer(0.01, fetches.ended.set).start()
    assert NewsOfCopies(tiers, fetches, wait_s=20.0).read() == (None, FetchNews((1,)))


def test_news_of_both_are_reported() -> None:
    fetches = Fetches()
    assert NewsOfCopies(lambda wait_s: TierNews((2,)), fetches, wait_s=20.0).read() == (TierNews((2,)), None)
    fetches.ended.set()
    assert NewsOfCopies(lambda wait_s: TierNews((2,)), fetches).read() == (TierNews((2,)), FetchNews((1,)))
    assert NewsOfCopies().read() == (None, None)
