"""Which states of a chunk are worth a slot. Pure decisions; the manager finds the room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forkpoint.cache.tree import Origin


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """What is known when tokens `[start, end)` of a request are about to be computed. All counts are of tokens.

    `prompt_end` is the number of tokens that are known beforehand and prefilled; at `junctions` cached (or lately
    evicted) histories part from this one, at `waiting_junctions` waiting prompts do; `breakpoints` were declared by
    the caller. `fallback_step` is how many tokens of keys and values a conversation may lose at once; where this one
    had lost its end, `num_survived_tokens` were left. Periodic states lie `interval` apart (0: none).
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
    """A position on the grid in `(start, end]`, and why. Without `displaces` it takes free room only."""

    num_tokens: int
    origin: Origin
    displaces: bool = True


class CapturePolicy:
    """Names the positions worth a state, the most valuable first; the cache rounds them down to the grid, and takes of
    each position in the chunk the first one. It is made without arguments, and keeps nothing between chunks."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        """Why, and after how many tokens; positions outside `(start, end]` do no harm."""
        raise NotImplementedError

    def candidates(self, context: CaptureContext) -> list[Candidate]:
        """The positions in the chunk, each once."""
        chosen: dict[int, Candidate] = {}
        for origin, positions in self.positions(context):
            for position in positions:
                floored = position // context.grid * context.grid
                if context.start < floored <= context.end and floored not in chosen:
                    chosen[floored] = Candidate(floored, origin, self.displaces(origin))
        return list(chosen.values())

    def displaces(self, origin: Origin) -> bool:
        """Whether a state of that kind may take the room of others that are worth less."""
        return True


class PromptEndCapture(CapturePolicy):
    """The ends of prompts alone."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.PROMPT_END, (context.prompt_end, context.prompt_end - 1)


class DenseCapture(CapturePolicy):
    """Every boundary."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.INTERVAL, _every(context.grid, context, context.end)


class DefaultCapture(PromptEndCapture):
    """All that `Origin` lists; periodic states take free room only."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        grid, end = context.grid, context.end
        yield Origin.JUNCTION, (*context.junctions, *context.waiting_junctions)
        yield from super().positions(context)
        yield Origin.BREAKPOINT, context.breakpoints
        yield Origin.NEAR_END, ((context.prompt_end - 1) // grid * grid - grid,)
        if context.fallback_step:
            step = -(-context.fallback_step // grid) * grid
            last = min(end, context.prompt_end - step // 2)  # not where the prompt's end is nearly as good
            if context.num_survived_tokens >= step:  # there will be room for about as much the next time
                last = min(last, context.num_survived_tokens)
                yield Origin.FALLBACK, (context.num_survived_tokens,)
            yield Origin.FALLBACK, _every(step, context, last)
        if context.interval:
            yield Origin.INTERVAL, _every(-(-context.interval // grid) * grid, context, end)

    def displaces(self, origin: Origin) -> bool:
        return origin is not Origin.INTERVAL


def _every(step: int, context: CaptureContext, last: int) -> range:
    """Multiples of `step` after the chunk's start, up to `last`."""
    return range(context.start // step * step + step, last + 1, step)
