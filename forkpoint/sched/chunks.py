"""Prefill chunks: where they end, and which states are stored on the way."""

from __future__ import annotations

from forkpoint.cache.capture import CaptureContext, CapturePolicy
from forkpoint.cache.manager import CacheManager
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.entry import Entry
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.request import Request


class ChunkPlanner:
    """Cuts prompts into chunks for a step's budget. Has no state of its own; the builder collects the chunks."""

    def __init__(
        self, cache: CacheManager, waiting: WaitingQueue, capture: CapturePolicy, interval: int, *, deterministic: bool
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._capture = capture
        self._interval = interval
        self._deterministic = deterministic
        self._grid = cache.layout.checkpoint_grid
        self._fallback_step = cache.layout.fallback_step(cache.arena.num_pages)

    def prefill_end(self, request: Request) -> int:
        """Tokens that go through the prefill kernels. Outputs of an earlier run do too, except in
        deterministic mode, where they are replayed through the decode kernels."""
        return request.num_prompt_tokens if self._deterministic else request.num_tokens

    def end(self, start: int, prefill_end: int, budget: int) -> int:
        """Where a chunk from `start` ends: at the end of the prompt, else on the grid."""
        end = min(prefill_end, start + budget)
        return end if end == prefill_end else end // self._grid * self._grid

    def add(self, builder: PlanBuilder, entry: Entry, start: int, end: int) -> None:
        """Plan the chunk `[start, end)` of a running entry, for which there are blocks, and what it saves."""
        request, lease = entry.request, entry.lease
        context = CaptureContext(
            start=start,
            end=end,
            prompt_end=entry.prefill_end,
            grid=self._grid,
            breakpoints=request.breakpoints,
            junctions=entry.junctions,
            waiting_junctions=self._waiting.junctions(lease.chain.hashes, start, end),
            fallback_step=self._fallback_step,
            num_survived_tokens=lease.num_survived_tokens,
            interval=self._interval,
        )
        self._cache.filing.plan_saves(lease, start, end, self._capture.candidates(context))
        entry.planned_step = builder.step
        builder.add_prefill(entry, end)
