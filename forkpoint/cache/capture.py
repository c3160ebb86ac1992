"""Which states of a chunk are worth a slot. Pure decisions; the manager finds the room."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from forkpoint.cache.layout import SPARSE_STEP
from forkpoint.cache.tree import Origin


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """What is known when tokens `[start, end)` of a request are about to be computed.

    `prompt_end` is the number of tokens that are known beforehand and prefilled; at `junctions` cached (or lately
    evicted) histories part from this one, at `waiting_junctions` waiting prompts do; `breakpoints` were declared by
    the caller. `fallback_step` is how many tokens of keys and values a conversation may lose at once; where this one
    had lost its end, `num_survived_tokens` were left.
    """

    start: int
    end: int
    prompt_end: int
    grid: int
    breakpoints: tuple[int, ...] = ()
    junctions: frozenset[int] = frozenset()
    waiting_junctions: frozenset[int] = frozenset()
    fallback_step: int = 0
    num_survived_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A position on the grid in `(start, end]`, and why. Without `displaces` it takes free room only."""

    num_tokens: int
    origin: Origin
    displaces: bool = True


class CapturePolicy(Protocol):
    """Names the candidates of a chunk, the most valuable first, each position once."""

    def candidates(self, context: CaptureContext) -> list[Candidate]: ...


@enum.unique
class Source(enum.Enum):
    """Where candidates come from, the most valuable first."""

    JUNCTION = "junction"  # seen in the tree: somebody came here before and parted
    QUEUE = "queue"  # seen among waiting prompts
    PROMPT_END = "prompt end"
    DECLARED = "declared"
    NEAR_END = "near end"  # for prompts whose last words (who speaks next, a reminder) the next turn does not repeat
    FALLBACK = "fallback"  # inside prompts that fill much of the arena: what is left when their end gives way
    SPARSE = "sparse"  # far apart inside prompts, for those that come back edited in the middle
    INTERVAL = "interval"


class SourcedCapture:
    """Candidates from some of the sources. Periodic ones lie `interval` tokens apart (0: none); with
    `periodic_displaces` they compete for room as the others do, otherwise they take free room only."""

    def __init__(self, sources: Iterable[Source], interval: int = 0, periodic_displaces: bool = False) -> None:
        self._sources = frozenset(sources)
        self._interval = interval if Source.INTERVAL in self._sources else 0
        self._periodic_displaces = periodic_displaces

    def candidates(self, context: CaptureContext) -> list[Candidate]:
        grid, start, end, sources = context.grid, context.start, context.end, self._sources
        chosen: dict[int, Candidate] = {}

        def offer(positions: Iterable[int], origin: Origin, displaces: bool = True) -> None:
            for position in positions:
                floored = position // grid * grid
                if start < floored <= end and floored not in chosen:
                    chosen[floored] = Candidate(floored, origin, displaces)

        if Source.JUNCTION in sources:
            offer(context.junctions, Origin.JUNCTION)
        if Source.QUEUE in sources:
            offer(context.waiting_junctions, Origin.JUNCTION)
        if Source.PROMPT_END in sources:
            offer((context.prompt_end, context.prompt_end - 1), Origin.PROMPT_END)
        if Source.DECLARED in sources:
            offer(context.breakpoints, Origin.DECLARED)
        if Source.NEAR_END in sources:
            offer([(context.prompt_end - 1) // grid * grid - grid], Origin.NEAR_END)
        if Source.FALLBACK in sources and context.fallback_step:
            step = -(-context.fallback_step // grid) * grid
            last = min(end, context.prompt_end - step // 2)  # not where the prompt's end is nearly as good
            if context.num_survived_tokens >= step:  # there will be room for about as much the next time
                last = min(last, context.num_survived_tokens)
                offer([context.num_survived_tokens], Origin.FALLBACK)
            offer(range(start // step * step + step, last + 1, step), Origin.FALLBACK)
        if Source.SPARSE in sources and not 0 < context.fallback_step < SPARSE_STEP:
            step = -(-SPARSE_STEP // grid) * grid
            last = min(end, context.prompt_end - step // 2)
            offer(range(start // step * step + step, last + 1, step), Origin.SPARSE)
        if self._interval:
            step = -(-self._interval // grid) * grid
            first = start // step * step + step
            offer(range(first, end + 1, step), Origin.INTERVAL, self._periodic_displaces)
        return list(chosen.values())


class DefaultCapture(SourcedCapture):
    """All sources; of the periodic ones those `interval` tokens apart (0: none) take free room only."""

    def __init__(self, interval: int) -> None:
        super().__init__(Source, interval)


# Each but `default` and the periodic ones keeps the prompt's end and what its name says.
_SOURCES: Final[Mapping[str, frozenset[Source]]] = MappingProxyType(
    {
        "prompt-end": frozenset({Source.PROMPT_END}),
        "declared": frozenset({Source.PROMPT_END, Source.DECLARED}),
        "junction": frozenset({Source.PROMPT_END, Source.JUNCTION}),
        "queue": frozenset({Source.PROMPT_END, Source.QUEUE}),
    }
)
CAPTURE_POLICIES: Final = ("default", "dense", "interval", *_SOURCES)


def make_capture(name: str, interval: int) -> CapturePolicy:
    """The capture policy of that name; `interval` is that of the periodic candidates."""
    match name:
        case "default":
            return DefaultCapture(interval)
        case "dense":
            return SourcedCapture({Source.INTERVAL}, interval=1, periodic_displaces=True)
        case "interval":
            return SourcedCapture({Source.INTERVAL}, interval, periodic_displaces=True)
    return SourcedCapture(_SOURCES[name])
