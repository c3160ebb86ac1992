"""Which states of a chunk are worth a slot. Pure decisions; the manager finds the room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from forkpoint.cache.tree import Origin


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """What is known when tokens `[start, end)` of a request are about to be computed.

    `prompt_end` is the number of tokens that are known beforehand and prefilled; `junctions` are positions
    where other histories, cached or waiting, part from this one; `breakpoints` were declared by the caller.
    """

    start: int
    end: int
    prompt_end: int
    grid: int
    breakpoints: tuple[int, ...] = ()
    junctions: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A position on the grid in `(start, end]`, and why."""

    num_tokens: int
    origin: Origin


class CapturePolicy(Protocol):
    """Names the candidates of a chunk, the most valuable first, each position once."""

    def candidates(self, context: CaptureContext) -> list[Candidate]: ...


class DefaultCapture:
    """Prompt end, junctions, declared boundaries, and every `interval` tokens (0: none)."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def candidates(self, context: CaptureContext) -> list[Candidate]:
        grid, start, end = context.grid, context.start, context.end
        chosen: dict[int, Origin] = {}

        def offer(positions: Iterable[int], origin: Origin) -> None:
            for position in positions:
                floored = position // grid * grid
                if start < floored <= end:
                    chosen.setdefault(floored, origin)

        offer(context.junctions, Origin.JUNCTION)
        offer((context.prompt_end, context.prompt_end - 1), Origin.PROMPT_END)
        offer(context.breakpoints, Origin.DECLARED)
        if self._interval:
            first = start // self._interval * self._interval + self._interval
            offer(range(first, end + 1, self._interval), Origin.INTERVAL)
        return [Candidate(position, origin) for position, origin in chosen.items()]
