"""News of copies that end later than the plan that started them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forkpoint.peer.link import PeerLink
from forkpoint.sched.plan import FetchNews, TierNews


@dataclass(frozen=True, slots=True)
class NewsOfCopies:
    """Reads news of copies that end later than their plan. `wait_s` is how long to wait for the first ones.

    `tiers` returns what the tiers have done. It is None if there are none, or if all their copies end with the plan.
    """

    tiers: Callable[[float], TierNews | None] | None = None
    peers: PeerLink | None = None
    wait_s: float = 0.0

    def read(self) -> tuple[TierNews | None, FetchNews | None]:
        """Return what the tiers and the fetches have done since the last call, None for each with no news."""
        fetched = self.peers.fetching.news() if self.peers is not None else None
        wait_s = 0.0 if fetched is not None else self.wait_s
        if self.tiers is not None:
            return self.tiers(wait_s), fetched
        if self.peers is not None and wait_s:
            fetched = self.peers.fetching.news(wait_s)
        return None, fetched


NO_NEWS: Final = NewsOfCopies()
