"""Chooses the replica that a request goes to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from forkpoint.errors import ConfigError

TOKENS_PER_WAITING_REQUEST: Final = 2048  # a cache hit of that many tokens is worth waiting for one request
# index of a replica -> tokens of the prompt that it could restore instead of computing
Restorable: TypeAlias = Callable[[int], int]


def round_robin(turn: int, loads: Sequence[int], restorable: Restorable) -> int:
    """Return the replicas' indices in turn."""
    return turn % len(loads)


def least_loaded(turn: int, loads: Sequence[int], restorable: Restorable) -> int:
    """Return the index of the replica with the fewest unfinished requests."""
    return loads.index(min(loads))


def prefix_aware(turn: int, loads: Sequence[int], restorable: Restorable) -> int:
    """Return the index of the replica that can restore most of the prompt, minus the cost of waiting there.

    Of equal ones, the one with fewer requests; then they take turns.
    """

    def worth(index: int) -> tuple[int, int, int]:
        waiting = loads[index]
        lost = waiting * TOKENS_PER_WAITING_REQUEST
        return restorable(index) - lost, -waiting, (index - turn) % len(loads)

    return max(range(len(loads)), key=worth)


_RULES: Final = MappingProxyType(
    {"round-robin": round_robin, "least-loaded": least_loaded, "prefix-aware": prefix_aware}
)
ROUTERS: Final = tuple(_RULES)


class Router:
    """Chooses among replicas by a rule of ROUTERS. Raises ConfigError for another name."""

    def __init__(self, name: str) -> None:
        if name not in _RULES:
            raise ConfigError(f"there is no routing policy {name!r}; give one of {', '.join(ROUTERS)}")
        self._rule, self._turns = _RULES[name], itertools.count()

    def choose(self, loads: Sequence[int], restorable: Restorable) -> int:
        """Return the index of a replica. `loads[i]` is the number of its queued and running requests."""
        return self._rule(next(self._turns), loads, restorable)
