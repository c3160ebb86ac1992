"""Either kind of load can have the whole arena, and what can never fit is refused by name."""

from __future__ import annotations

import pytest

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import SchedulerConfig
from forkpoint.errors import QueueFullError, RequestTooLargeError
from forkpoint.sched.plan import StepPlan
from forkpoint.sched.scheduler import Scheduler
from tests.cache.shapes import REAL_LAYOUTS
from tests.sched.harness import LAYOUTS, Harness, tokens

ALL = {**LAYOUTS, **REAL_LAYOUTS}


def arena(layout: CacheLayout, num_pages: int = 40, **options: int) -> Harness:
    return Harness(layout=layout, num_pages=num_pages + 1, check=False, **options)  # type: ignore[arg-type]


def units(layout: CacheLayout, num_pages: int = 40) -> tuple[int, int]:
    return num_pages * layout.blocks_per_page, num_pages * layout.slots_per_page


@pytest.mark.parametrize("name", [name for name, layout in ALL.items() if layout.has_kv])
def test_one_long_prompt_fills_the_arena_with_blocks(name: str) -> None:
    layout = ALL[name]
    pages = 40 if layout.blocks_per_page < 100 else 4
    harness = arena(layout, pages)
    blocks, _ = units(layout, pages - layout.has_states)  # one page for the running slot
    request = harness.add("long", tokens(1, 64 * blocks - 1), 1)
    peak = 0
    while harness.step():
        peak = max(peak, harness.sched.stats().cache.num_blocks_used)
    harness.check_output("long")
    assert request.num_preemptions == 0
    assert peak == blocks and peak >= 0.95 * units(layout, pages - layout.has_states)[0]


@pytest.mark.parametrize("name", [name for name, layout in ALL.items() if layout.has_states])
def test_short_prompts_fill_the_arena_with_states(name: str) -> None:
    """One-block prompts leave a checkpoint each; nearly all room goes to slots, with blocks beside them."""
    layout = ALL[name]
    pages = 40 if layout.slots_per_page < 30 else 6
    _, slots = units(layout, pages)
    harness = arena(layout, pages, max_num_seqs=2 * slots, budget=max(2048, 2 * slots + 63))
    peak_pages = peak_slots = 0
    for index in range(2 * slots):
        harness.add(f"r{index}", tokens(index, 3), 8)
    while harness.step():
        stats = harness.sched.stats().cache
        peak_slots = max(peak_slots, stats.num_slots_used)
        used = stats.num_slots_used / max(layout.slots_per_page, 1)
        used += stats.num_blocks_used / layout.blocks_per_page if layout.has_kv else 0
        peak_pages = max(peak_pages, used)
    for index in range(2 * slots):
        harness.check_output(f"r{index}")
    per_request = 1 / layout.slots_per_page + (1 / layout.blocks_per_page if layout.has_kv else 0)
    assert peak_slots >= 0.9 * pages / per_request, f"{peak_slots} slots of {slots}"
    assert peak_pages >= 0.9 * pages


