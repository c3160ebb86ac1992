"""Which replica a request goes to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Protocol

from forkpoint.errors import ConfigError
from forkpoint.sim.system import ServedSystem
from forkpoint.sim.trace import TraceRequest

TOKENS_PER_WAITING_REQUEST: Final = 2048  # a hit of so many tokens is worth queueing behind one request


class Router(Protocol):
    """Chooses among replicas; may keep state."""

    def choose(self, request: TraceRequest, replicas: Sequence[ServedSystem]) -> int: ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, request: TraceRequest, replicas: Sequence[ServedSystem]) -> int:
        return next(self._turns) % len(replicas)


class LeastLoaded:
    """The replica with the fewest unfinished requests."""

    def choose(self, request: TraceRequest, replicas: Sequence[ServedSystem]) -> int:
        return min(range(len(replicas)), key=lambda index: (replicas[index].num_unfinished(), index))


class PrefixAware:
    """The replica that can restore most of the prompt, less what waiting there costs."""

    def choose(self, request: TraceRequest, replicas: Sequence[ServedSystem]) -> int:
        def worth(index: int) -> tuple[int, int]:
            replica = replicas[index]
            waiting = replica.num_unfinished()
            return replica.restorable(request) - waiting * TOKENS_PER_WAITING_REQUEST, -waiting

        return max(range(len(replicas)), key=worth)


ROUTERS: Final = ("round-robin", "least-loaded", "prefix-aware")


def make_router(name: str) -> Router:
    """A router by name. Raises ConfigError."""
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
        case "prefix-aware":
            return PrefixAware()
    raise ConfigError(f"no routing policy {name!r}; give one of {', '.join(ROUTERS)}")
