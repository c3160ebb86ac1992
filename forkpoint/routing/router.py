"""Which replica a request goes to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from forkpoint.errors import ConfigError

TOKENS_PER_WAITING_REQUEST: Final = 2048  # a hit of so many tokens is worth queueing behind one request
Restorable: TypeAlias = Callable[[int], int]  # of a replica: tokens of the prompt that it would not have to compute


def round_robin(turn: int, loads: Sequence[int], restorable: Restorable) -> int:
    """One after the other."""
    return turn % len(loads)


def least_loaded(turn: int, loads: Sequence[int], restorable: Restorable) -> int:
    """The replica with the fewest unfinished requests."""
    return loads.index(min(loads))


def prefix_aware(turn: int, loads: Sequence[int], restorable: Restorable) -> int:
    """The replica that can restore most of the prompt, less what waiting there costs; of equal ones each in turn."""

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
    """Chooses among replicas by the rule of that name. Raises ConfigError."""

    def __init__(self, name: str) -> None:
        if name not in _RULES:
            raise ConfigError(f"no routing policy {name!r}; give one of {', '.join(ROUTERS)}")
        self._rule, self._turns = _RULES[name], itertools.count()

    def choose(self, loads: Sequence[int], restorable: Restorable) -> int:
        """The place of a replica among those of which `loads` says how many requests are queued or run there."""
        return self._rule(next(self._turns), loads, restorable)
