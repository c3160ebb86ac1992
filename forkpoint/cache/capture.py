"""Capture policies: which states of a chunk are worth a slot. They only decide; the cache finds the room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Any, Final

from forkpoint.cache.policy_answers import note_policy, wrong_answer
from forkpoint.cache.tree import Origin
from forkpoint.checks import shown
from forkpoint.errors import ConfigError, ForkpointError

POSITIONS_OF: Final = "positions() of the capture policy"
PAIRS: Final = "give pairs of an Origin and its positions, such as (Origin.BREAKPOINT, (128, 256))"
POSITIONS: Final = "give integers, in tokens; they are rounded down to multiples of 64"


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """Facts that a policy gets before tokens `[start, end)` of a request are computed. All numbers count tokens.

    `prompt_end` is where prefill ends. Cached or lately evicted histories part from this one at `junctions`; waiting
    prompts part from it at `waiting_junctions`. The caller declared the `breakpoints`. `fallback_step` is how many
    tokens of keys and values a conversation may lose at once. If the conversation lost its end,
    `num_survived_tokens` is how many were left, otherwise 0. Periodic states lie `interval` apart; 0 means none.
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
    interval: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A position on the grid in `(start, end]`, and why it is worth a state. `displaces`: it may evict others."""

    num_tokens: int
    origin: Origin
    displaces: bool = True


class CapturePolicy:
    """Names the positions that are worth a state, the most valuable first.

    The cache rounds them down to the grid; the first reason for a position counts. A policy is made without arguments
    and keeps nothing between chunks.
    """

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        """Yield reasons, each with its positions. Positions outside `(start, end]` are ignored."""
        raise NotImplementedError

    def candidates(self, context: CaptureContext) -> list[Candidate]:
        """Return the chunk's positions, rounded down to the grid: each once, with its first reason.

        Raises ConfigError if `positions` gave something else than reasons and integers.
        """
        try:
            return self._chosen(context)
        except ForkpointError:
            raise
        except Exception as error:
            note_policy(error, self, POSITIONS_OF)
            raise

    def _chosen(self, context: CaptureContext) -> list[Candidate]:
        chosen: dict[int, Candidate] = {}
        for reason in self._each(self.positions(context), "returned"):
            if not (isinstance(reason, tuple) and len(reason) == 2 and isinstance(reason[0], Origin)):
                raise self._wrong(f"gave {shown(reason)}", PAIRS)
            origin, positions = reason
            for position in self._each(positions, "gave"):
                try:
                    floored = index(position) // context.grid * context.grid
                except TypeError:
                    raise self._wrong(f"gave the position {shown(position)}", POSITIONS) from None
                if context.start < floored <= context.end and floored not in chosen:
                    chosen[floored] = Candidate(floored, origin, self.displaces(origin))
        return list(chosen.values())

    def _each(self, given: Any, how: str) -> Iterator[Any]:
        try:
            return iter(given)
        except TypeError:
            raise self._wrong(f"{how} {shown(given)}", PAIRS) from None

    def _wrong(self, said: str, do: str) -> ConfigError:
        return wrong_answer(self, POSITIONS_OF, said, do)

    def displaces(self, origin: Origin) -> bool:
        """Return whether a state of that origin may evict others that are worth less."""
        return True


class PromptEndCapture(CapturePolicy):
    """Keeps only the ends of prompts."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.PROMPT_END, (context.prompt_end, context.prompt_end - 1)


class DenseCapture(CapturePolicy):
    """Keeps every boundary."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.INTERVAL, _every(context.grid, context, context.end)


class DefaultCapture(PromptEndCapture):
    """Keeps all origins that a chunk can have. Periodic states take free room only; the others may evict."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        grid, end = context.grid, context.end
        yield Origin.JUNCTION, (*context.junctions, *context.waiting_junctions)
        yield from super().positions(context)
        yield Origin.BREAKPOINT, context.breakpoints
        yield Origin.NEAR_END, ((context.prompt_end - 1) // grid * grid - grid,)
        if context.fallback_step:
            step = -(-context.fallback_step // grid) * grid
            last = min(end, context.prompt_end - step // 2)  # closer to it, the prompt's end is nearly as good
            if context.num_survived_tokens >= step:  # expect as much to survive the next time
                last = min(last, context.num_survived_tokens)
                yield Origin.FALLBACK, (context.num_survived_tokens,)
            yield Origin.FALLBACK, _every(step, context, last)
        if context.interval:
            yield Origin.INTERVAL, _every(-(-context.interval // grid) * grid, context, end)

    def displaces(self, origin: Origin) -> bool:
        return origin is not Origin.INTERVAL


def _every(step: int, context: CaptureContext, last: int) -> range:
    """Return the multiples of `step` after the chunk's start, up to `last`."""
    return range(context.start // step * step + step, last + 1, step)
