"""How the scheduler stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from forkpoint.cache.counters import CacheStats


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What became of drafts since the start."""

    num_drafts: int = 0  # times that a row had some
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: dict[str, int] = field(default_factory=dict)  # by position in the draft, from 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters; `cache` has those of the cache, `drafts` those of speculation."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    num_pages_held: int  # by requests; what is merely cached is not among them
    num_slots_held: int
    blocks_per_page: int
    slots_per_page: int
    cache: CacheStats
    drafts: DraftStats = field(default_factory=DraftStats)
