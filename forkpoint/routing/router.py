"""Which replica a request goes to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from forkpoint.errors import ConfigError

Request = TypeVar("Request")
Asked = TypeVar("Asked", contravariant=True)

TOKENS_PER_WAITING_REQUEST: Final = 2048  # a hit of so many tokens is worth queueing behind one request


class Replica(Protocol[Asked]):
    """What is known of a replica: one that is simulated, or one that publishes events."""

    def restorable(self, request: Asked) -> int:
        """Tokens of the prompt that a request added now would not have to compute."""

    def num_unfinished(self) -> int:
        """Requests that are queued or run."""


class Router(Protocol):
    """Chooses among replicas; may keep state."""

    def choose(self, request: Request, replicas: Sequence[Replica[Request]]) -> int: ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, request: Request, replicas: Sequence[Replica[Request]]) -> int:
        return next(self._turns) % len(replicas)


class LeastLoaded:
    """The replica with the fewest unfinished requests."""

    def choose(self, request: Request, replicas: Sequence[Replica[Request]]) -> int:
        return min(range(len(replicas)), key=lambda index: (replicas[index].num_unfinished(), index))


class PrefixAware:
    """The replica that can restore most of the prompt, less what waiting there costs; of equal ones each in turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, request: Request, replicas: Sequence[Replica[Request]]) -> int:
        turn = next(self._turns)

        def worth(index: int) -> tuple[int, int, int]:
            replica = replicas[index]
            waiting = replica.num_unfinished()
            lost = waiting * TOKENS_PER_WAITING_REQUEST
            return replica.restorable(request) - lost, -waiting, (index - turn) % len(replicas)

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
