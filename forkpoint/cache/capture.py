"""Capture policies: which states of a chunk are worth a slot. They only decide; the cache finds the room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forkpoint.cache.tree import Origin
from forkpoint.config import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """Facts that a policy gets before tokens `[start, end)` of a request are computed. All numbers count tokens."""

    start: int
    end: int
    prompt_end: int  # prefill ends here
    breakpoints: tuple[int, ...] = ()  # declared by the caller
    junctions: frozenset[int] = frozenset()  # cached or lately evicted histories part from this one here
    waiting_junctions: frozenset[int] = frozenset()  # waiting prompts part from this one here
    fallback_step: int = 0  # whole blocks of keys and values that a conversation may lose at once; 0: no fallbacks
    num_survived_tokens: int = 0  # tokens that were left of a conversation that lost its end; 0: it did not
    interval: int = 0  # distance of periodic states, whole blocks; 0: there are none


@dataclass(frozen=True, slots=True)
class Candidate:
    """A multiple of BLOCK_SIZE in `(start, end]`, and why it is worth a state. `displaces`: it may evict others."""

    num_tokens: int
    origin: Origin
    displaces: bool = True


class CapturePolicy:
    """Names the positions of a prompt that are worth a state, the most valuable first.

    The cache rounds them down to multiples of BLOCK_SIZE; the first reason for a position counts. A policy is made
    without arguments and keeps nothing between chunks. The last boundary of an answer is always a candidate.
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
        yield Origin.INTERVAL, _every(BLOCK_SIZE, context, context.end)


class DefaultCapture(PromptEndCapture):
    """Keeps all origins that a chunk can have. Periodic states take free room only; the others may evict."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.JUNCTION, (*context.junctions, *context.waiting_junctions)
        yield from super().positions(context)
        yield Origin.BREAKPOINT, context.breakpoints
        yield Origin.NEAR_END, (context.prompt_end - 1 - BLOCK_SIZE,)
        if context.fallback_step:
            step = context.fallback_step
            last = min(context.end, context.prompt_end - step // 2)  # closer to it, the prompt's end is nearly as good
            if context.num_survived_tokens >= step:  # expect as much to survive the next time
                last = min(last, context.num_survived_tokens)
                yield Origin.FALLBACK, (context.num_survived_tokens,)
            yield Origin.FALLBACK, _every(step, context, last)
        if context.interval:
            yield Origin.INTERVAL, _every(context.interval, context, context.end)

    def displaces(self, origin: Origin) -> bool:
        return origin is not Origin.INTERVAL


def _every(step: int, context: CaptureContext, last: int) -> range:
    """Return the multiples of `step` after the chunk's start, up to `last`."""
    return range(context.start // step * step + step, last + 1, step)
