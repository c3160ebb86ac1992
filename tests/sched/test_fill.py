"""Either kind of load can have the whole arena, and what can never fit is refused by name."""

from __future__ import annotations

import pytest

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import SchedulerConfig
from forkpoint.errors import QueueFullError, RequestTooLargeError
from tests.cache.shapes import REAL_LAYOUTS
from tests.sched.harness import LAYOUTS, Harness, tokens

# Windows take pages too, of which these tests would have to know.
ALL = {name: layout for name, layout in {**LAYOUTS, **REAL_LAYOUTS}.items() if not layout.windows}


def arena(layout: CacheLayout, num_pages: int, **options: int) -> Harness:
    return Harness(layout=layout, num_pages=num_pages + 1, check=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, layout in ALL.items() if layout.has_kv])
def test_one_long_prompt_fills_the_arena_with_blocks(name: str) -> None:
    layout = ALL[name]
    pages = 24 if layout.blocks_per_page < 20 else 6
    harness = arena(layout, pages)
    blocks = (pages - layout.has_states) * layout.blocks_per_page  # one page has the running slot
    request = harness.add("long", tokens(1, 64 * blocks - 2), 2)
    peak = 0
    while harness.step():
        peak = max(peak, harness.sched.stats().cache.num_blocks_used)
    harness.check_output("long")
    assert request.num_preemptions == 0
    assert peak == blocks


@pytest.mark.parametrize("name", [name for name, layout in ALL.items() if layout.has_states])
def test_short_prompts_fill_the_arena_with_states(name: str) -> None:
    """One-block prompts leave a checkpoint each, and as much room as there is for them goes to slots."""
    layout = ALL[name]
    pages = 24 if layout.slots_per_page < 20 else 6
    per_prompt = 1 / layout.slots_per_page + (1 / layout.blocks_per_page if layout.has_kv else 0)  # pages
    harness = arena(layout, pages, max_num_seqs=8)
    names = [f"r{index}" for index in range(int(1.5 * pages / per_prompt))]
    for index, prompt in enumerate(names):
        harness.add(prompt, tokens(index, 65), 2)
    peak_slots, peak_pages = 0, 0.0
    while harness.step():
        stats = harness.sched.stats().cache
        peak_slots = max(peak_slots, stats.num_slots_used)
        blocks = stats.num_blocks_used / layout.blocks_per_page if layout.has_kv else 0
        peak_pages = max(peak_pages, stats.num_slots_used / layout.slots_per_page + blocks)
    for prompt in names:
        harness.check_output(prompt)
    assert peak_pages >= 0.95 * pages
    assert peak_slots >= 0.95 * int(pages / per_prompt)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_request_that_can_never_fit_is_refused_by_name(name: str) -> None:
    layout = LAYOUTS[name]
    harness = arena(layout, 10)
    if not layout.has_kv:
        assert harness.add("any", tokens(1, 5000), 1)
        return
    largest = 64 * layout.blocks_per_page * (10 - layout.has_states)
    says = r"request big: \d+ prompt \+ 2 output tokens need \d+ bytes .* has \d+; .* raise kv_cache"
    with pytest.raises(RequestTooLargeError, match=says):
        harness.add("big", tokens(1, largest - 1), 2)
    harness.ask("fits", tokens(1, largest - 2), 2)


def test_the_queue_is_bounded() -> None:
    harness = Harness()
    harness.sched.config = SchedulerConfig(max_queue_len=2)
    harness.add("a", tokens(1, 10))
    harness.add("b", tokens(2, 10))
    with pytest.raises(QueueFullError, match="max_queue_len=2"):
        harness.add("c", tokens(3, 10))
    harness.run()
    harness.check_output("a")
    harness.check_output("b")
