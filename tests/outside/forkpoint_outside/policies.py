"""Policies of a few lines."""

from __future__ import annotations

from collections.abc import Iterable

from forkpoint.cache.capture import CaptureContext, CapturePolicy
from forkpoint.cache.eviction import EntryFacts, EvictionPolicy
from forkpoint.cache.tree import Origin


class OldestFirst(EvictionPolicy):
    """The entry used longest ago goes first."""

    def key(self, entry: EntryFacts) -> float:
        return entry.last_used


class Every128(CapturePolicy):
    """A state every 128 tokens of a prompt."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.INTERVAL, range(128, context.prompt_end, 128)
