"""News of copies that end later than the plan that started them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from forkpoint.sched.plan import FetchNews, TierNews

TURN_S: Final = 0.001  # wait of a step without work for fetches, before it looks at the tiers again


class Fetches(Protocol):
    """Fetches from other engines, as `peer.fetching.Fetching`."""

    def news(self, wait_s: float = 0.0) -> FetchNews | None:
        """Return the fetches that ended since the last call. Wait at most `wait_s` for the first."""


@dataclass(frozen=True, slots=True)
class NewsOfCopies:
    """Reads the news of copies that end later than their plan, and waits up to `wait_s` for the first news.

    `tiers` takes a number of seconds to wait and returns the tiers' news. It is None without tiers, or if all their
    copies end with the plan. `fetches` is None without a link to other engines.
    """

    tiers: Callable[[float], TierNews | None] | None = None
    fetches: Fetches | None = None
    wait_s: float = 0.0

    def read(self) -> tuple[TierNews | None, FetchNews | None]:
        """Return the news of the tiers and of the fetches since the last call, None for each without news."""
        if self.tiers is None or self.fetches is None:
            return (
                None if self.tiers is None else self.tiers(self.wait_s),
                None if self.fetches is None else self.fetches.news(self.wait_s),
            )
        until_s = time.monotonic() + self.wait_s
        while True:
            copied, fetched = self.tiers(0.0), self.fetches.news()
            left_s = until_s - time.monotonic()
            if copied is not None or fetched is not None or left_s <= 0:
                return copied, fetched
            # The tiers do not wait while they have no copies. The thread sleeps, because others need the interpreter.
            fetched = self.fetches.news(min(left_s, TURN_S))
            if fetched is not None:
                return None, fetched
