"""Counters of what the cache did, for metrics, logs and the simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheCounters:
    """Written by the cache alone; read them through `PrefixStore.stats`. By reason, and by `Origin`, where there are
    several."""

    query_tokens: int = 0  # prompt tokens that asked
    hit_tokens: int = 0  # of those, tokens that were reused
    lost_tokens: dict[str, int] = field(default_factory=Counter)  # reusable tokens that were not, by reason
    checkpoints_saved: dict[str, int] = field(default_factory=Counter)
    checkpoints_evicted: dict[str, int] = field(default_factory=Counter)
    checkpoint_hits: dict[str, int] = field(default_factory=Counter)
    checkpoints_skipped: dict[str, int] = field(default_factory=Counter)  # wanted, but there was no room
    blocks_evicted: int = 0
    moves: int = 0


@dataclass(slots=True, kw_only=True)
class CacheStats(CacheCounters):
    """A reading of the cache: what was counted since the start, and gauges now."""

    num_pages: int
    num_free_pages: int
    num_blocks_used: int
    num_slots_used: int
    num_cached_blocks: int
    num_checkpoints: int
    num_ghosts: int
