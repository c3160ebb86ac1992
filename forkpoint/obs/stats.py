"""The line that sums up the last seconds for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment: tokens since the start, and the engine's stats."""

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    stats: Mapping[str, Any]


def load_line(before: Reading, now: Reading) -> str:
    """What happened between two readings, and what the engine holds now."""
    elapsed = max(now.time_s - before.time_s, 1e-9)
    stats = now.stats
    pages = max(1, stats["num_pages"] - 1)
    parts = [
        f"prompts {(now.num_prompt_tokens - before.num_prompt_tokens) / elapsed:,.1f} tokens/s",
        f"answers {(now.num_output_tokens - before.num_output_tokens) / elapsed:,.1f} tokens/s",
        f"running {stats['num_running']}, waiting {stats['num_waiting']}",
        f"arena {stats['num_pages_held'] / pages:.1%} held by requests",
    ]
    if stats["slots_per_page"]:
        parts.append(f"slots {stats['num_slots_held']} running + {stats['num_checkpoints']} checkpoints")
    queried, hit = _grown(before, now, "query_tokens"), _grown(before, now, "hit_tokens")
    parts.append(f"prefix cache hit rate {hit / queried:.1%}" if queried else "no prompts looked up")
    lost = sum(stats["lost_tokens"].get(reason, 0) - before.stats["lost_tokens"].get(reason, 0) for reason in MISSED)
    if lost > 0:
        parts.append(f"lost to missing checkpoints {lost:,} tokens")
    preempted = _grown(before, now, "num_preemptions")
    if preempted:
        parts.append(f"preempted {preempted}")
    return ", ".join(parts)


def is_idle(before: Reading, now: Reading) -> bool:
    return now.num_output_tokens == before.num_output_tokens and not now.stats["num_running"] + now.stats["num_waiting"]


MISSED = ("no_checkpoint", "evicted")


def _grown(before: Reading, now: Reading, name: str) -> int:
    return int(now.stats[name]) - int(before.stats[name])
