"""Which replica a request goes to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import MappingProxyType
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


def round_robin(turn: int, request: Request, replicas: Sequence[Replica[Request]]) -> int:
    """One after the other."""
    return turn % len(replicas)


def least_loaded(turn: int, request: Request, replicas: Sequence[Replica[Request]]) -> int:
    """The replica with the fewest unfinished requests."""
    return min(range(len(replicas)), key=lambda index: (replicas[index].num_unfinished(), index))


def prefix_aware(turn: int, request: Request, replicas: Sequence[Replica[Request]]) -> int:
    """The replica that can restore most of the prompt, less what waiting there costs; of equal ones each in turn."""

    def worth(index: int) -> tuple[int, int, int]:
        replica = replicas[index]
        waiting = replica.num_unfinished()
        lost = waiting * TOKENS_PER_WAITING_REQUEST
        return replica.restorable(request) - lost, -waiting, (index - turn) % len(replicas)

    return max(range(len(replicas)), key=worth)


_RULES: Final = MappingProxyType(
    {"round-robin": round_robin, "least-loaded": least_loaded, "prefix-aware": prefix_aware}
)
ROUTERS: Final = tuple(_RULES)


class Router:
    """Chooses among replicas by the rule of that name. Raises ConfigError."""

    def __init__(self, name: str) -> None:
        if name not in _RULES:
            raise ConfigError(f"no routing policy {name!r}; give one of {', '.join(ROUTERS)}")
        self._rule, self._turns = _RULES[name], itertools.count()

    def choose(self, request: Request, replicas: Sequence[Replica[Request]]) -> int:
        return self._rule(next(self._turns), request, replicas)
