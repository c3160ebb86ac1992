"""Capture policies: which positions of a prompt are worth a state. They only decide; the cache finds the room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forkpoint.cache.tree import Origin
from forkpoint.config import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """Facts about a chunk, the tokens `[start, end)` of a prompt, before it is computed. All numbers are in tokens."""

    start: int
    end: int
    prompt_end: int  # where prefill ends; after a preemption, earlier outputs are a part of the prompt
    breakpoints: tuple[int, ...] = ()  # ends of messages and of the tool list, and positions that the caller named
    junctions: frozenset[int] = frozenset()  # cached or lately evicted histories part from this prompt here
    waiting_junctions: frozenset[int] = frozenset()  # waiting prompts part from this prompt here
    fallback_step: int = 0  # distance of fallbacks, a multiple of 64; 0: there are none
    num_survived_tokens: int = 0  # if the conversation's end was evicted: how far its keys and values reach; else 0
    interval: int = 0  # distance of periodic states; 0: there are none


@dataclass(frozen=True, slots=True)
class Candidate:
    """A position in `(start, end]`, a multiple of BLOCK_SIZE, and why its state may be worth a slot.

    `may_evict`: if no slot is free, entries with smaller keys are evicted.
    """

    num_tokens: int
    origin: Origin
    may_evict: bool = True


class CapturePolicy:
    """Names the positions of a prompt that are worth a state, the most valuable first.

    The cache rounds them down to multiples of BLOCK_SIZE; the first reason for a position counts. One object, created
    without arguments, serves all requests and keeps nothing between chunks. The last boundary of an answer is always a
    candidate, with `Origin.DECODE`.
    """

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        """Yield reasons, each with its positions. Positions outside `(start, end]` are ignored."""
        raise NotImplementedError

    def may_evict(self, origin: Origin) -> bool:
        """Return whether a state of that origin may evict entries with smaller keys. False: it takes free room only."""
        return True


class PromptEndCapture(CapturePolicy):
    """Names only the end of the prompt."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        # The same prompt resumes before its last token, which it has to compute; its next turn resumes at the end.
        yield Origin.PROMPT_END, (context.prompt_end, context.prompt_end - 1)


class DenseCapture(CapturePolicy):
    """Names every block boundary."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.INTERVAL, _every(BLOCK_SIZE, context, context.end)


class DefaultCapture(PromptEndCapture):
    """Names positions of every origin that a prompt can have. Periodic states take free room only."""

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

    def may_evict(self, origin: Origin) -> bool:
        return origin is not Origin.INTERVAL


def _every(step: int, context: CaptureContext, last: int) -> range:
    """Return the multiples of `step` after the chunk's start, up to `last`."""
    return range(context.start // step * step + step, last + 1, step)
