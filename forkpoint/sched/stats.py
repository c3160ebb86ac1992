"""Readings of the scheduler for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass, field

from forkpoint.cache.counters import CacheStats


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counters of drafts since the start."""

    num_drafts: int = 0  # steps of rows with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: dict[str, int] = field(default_factory=dict)  # by position in the draft, from 0


@dataclass(slots=True)
class EncoderStats:
    """Counters of the vision tower since the start. An image counts in each chunk of a prompt that needs it."""

    num_images_encoded: int = 0
    num_image_tokens_encoded: int = 0
    num_images_kept: int = 0  # images whose embeddings were there, so that the tower did not run
    num_image_tokens_kept: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters of the scheduler, of the cache, of speculative decoding and of the vision tower."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    num_pages_held: int  # by requests; cached entries that can be evicted are not counted
    num_slots_held: int
    blocks_per_page: int
    slots_per_page: int
    cache: CacheStats
    drafts: DraftStats = field(default_factory=DraftStats)
    encoder: EncoderStats = field(default_factory=EncoderStats)
