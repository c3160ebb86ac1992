"""Capture policies: which states of a chunk are worth a slot. They only decide; the cache finds the room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forkpoint.cache.tree import Origin


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """Facts that a policy gets before tokens `[start, end)` of a request are computed. All numbers count tokens."""

    start: int
    end: int
    prompt_end: int  # where prefill ends
    grid: int  # states lie at its multiples
    breakpoints: tuple[int, ...] = ()  # that the caller declared
    junctions: frozenset[int] = frozenset()  # where cached or lately evicted histories part from this one
    waiting_junctions: frozenset[int] = frozenset()  # where waiting prompts part from this one
    fallback_step: int = 0  # tokens of keys and values that a conversation may lose at once
    num_survived_tokens: int = 0  # tokens that were left of a conversation that lost its end; 0: it did not
    interval: int = 0  # distance of periodic states; 0: there are none


@dataclass(frozen=True, slots=True)
class Candidate:
    """A position on the grid in `(start, end]`, and why it is worth a state. `displaces`: it may evict others."""

    num_tokens: int
    origin: Origin
    displaces: bool = True


class CapturePolicy:
    """Names the positions of a prompt that are worth a state, the most valuable first.

    The cache rounds them down to the grid; the first reason for a position counts. A policy is made without arguments
    and keeps nothing between chunks. The last boundary of an answer is always a candidate.
    """

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        """Yield reasons, each with its positions. Positions outside `(start, end]` are ignored."""
        raise NotImplementedError

    def displaces(self, origin: Origin) -> bool:
        """Return whether a state of that origin may evict others that are worth less."""
        return True


class PromptEndCapture(CapturePolicy):
    """Keeps only the ends of prompts."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        # The same prompt resumes before its last token, which it has to compute; its next turn resumes at the end.
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
