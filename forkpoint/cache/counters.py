"""Counters of what the cache did, for metrics, logs and the simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheCounters:
    """Counters of the cache since the start. The cache alone writes them. Read them through `CacheManager.stats`.

    Counters with several entries are by miss reason or by `Origin`.
    """

    query_tokens: int = 0  # tokens of all prompts that were looked up
    hit_tokens: int = 0  # the looked-up tokens that were reused
    # tokens that were cached once and not reused, by reason
    lost_tokens: dict[str, int] = field(default_factory=Counter)
    checkpoints_saved: dict[str, int] = field(default_factory=Counter)
    checkpoints_evicted: dict[str, int] = field(default_factory=Counter)
    checkpoint_hits: dict[str, int] = field(default_factory=Counter)
    checkpoints_skipped: dict[str, int] = field(default_factory=Counter)  # worth a slot, but there was no room
    blocks_evicted: int = 0
    moves: int = 0  # units that compaction moved
    host_hit_tokens: int = 0  # the reused tokens that were copied from the host tier
    host_stored_bytes: int = 0
    host_loaded_bytes: int = 0
    host_skipped: int = 0  # evicted entries that were worth less than what the host tier would have evicted for them
    disk_hit_tokens: int = 0  # the reused tokens that were read from the disk tier
    disk_stored_bytes: int = 0
    disk_loaded_bytes: int = 0
    disk_skipped: int = 0  # evicted entries that the disk tier did not store
    disk_failed_reads: int = 0  # reads that failed, also those of damaged entries
    disk_failed_writes: int = 0
    peer_hit_tokens: int = 0  # the reused tokens that another engine computed
    peer_offered_bytes: int = 0  # bytes that were copied for other engines
    peer_fetched_bytes: int = 0
    peer_failed_fetches: int = 0  # prompts of other engines that were computed here

    def count_query(self, num_tokens: int, num_cached: int, num_restored: int, source: str) -> None:
        """Count a prompt's tokens and the reused ones, of which `num_restored` were restored from `source`, by name."""
        self.query_tokens += num_tokens
        self.hit_tokens += num_cached
        if source == "disk":
            self.disk_hit_tokens += num_restored
        elif source == "peer":
            self.peer_hit_tokens += num_restored
        else:
            self.host_hit_tokens += num_restored


@dataclass(slots=True, kw_only=True)
class CacheStats(CacheCounters):
    """A reading of the cache: the counters, and gauges as they are now."""

    num_pages: int
    num_free_pages: int
    num_blocks_used: int
    num_slots_used: int
    num_cached_blocks: int
    num_checkpoints: int
    num_ghosts: int
    num_host_pages: int = 0
    num_free_host_pages: int = 0
    num_host_blocks: int = 0
    num_host_checkpoints: int = 0
    num_disk_pages: int = 0
    num_free_disk_pages: int = 0
    num_disk_blocks: int = 0
    num_disk_checkpoints: int = 0
