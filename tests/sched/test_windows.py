"""Layers with windows keep no more than their windows: what that saves, and what hits and rollbacks still find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import CacheConfig
from tests.cache.shapes import attention
from tests.sched.harness import WINDOWED, Harness, tokens

LAYERS = [(attention(4, 128),), *[(replace(attention(4, 128), window=256),)] * 5]
NAMES = pytest.mark.parametrize("name", WINDOWED)


def most_running_tokens(layout: CacheLayout, num_bytes: int, **tiers: int) -> int:
    """The tokens of all requests that run together, at their most, before one is preempted or ends."""
    length, most = 6000, 0
    harness = Harness(layout=layout, num_pages=num_bytes // layout.page_bytes, check=False, **tiers)
    for index in range(40):
        harness.add(f"r{index}", tokens(index, length), 200)
    while harness.step():
        stats = harness.sched.stats()
        if stats.num_preemptions or not stats.num_waiting or stats.num_running * length < most:
            break
        most = stats.num_running * length
    return most


@pytest.mark.parametrize("tiers", [{}, {"num_host_pages": 60, "num_disk_pages": 60}], ids=["", "tiers"])
def test_a_model_of_which_one_layer_in_six_is_full_holds_four_times_the_tokens(tiers: dict[str, int]) -> None:
    kept, bounded = CacheLayout.create(LAYERS, longest=0), CacheLayout.create(LAYERS)
    assert not kept.windows and len(bounded.windows) == 1
    num_bytes = 700 * kept.page_bytes
    assert most_running_tokens(bounded, num_bytes, **tiers) >= 4 * most_running_tokens(kept, num_bytes, **tiers) > 0


@NAMES
def test_a_request_holds_its_windows_and_no_more(name: str) -> None:
    layout = WINDOWED[name]
    harness = Harness(layout=layout, cache=CacheConfig(enable_prefix_caching=False), budget=128)
    harness.add("long", tokens(1, 1500), 200)
    while harness.step():
        for group, pool in zip(layout.windows, harness.sched.cache.arena.windows, strict=True):
            assert pool.num_used <= group.most_blocks + 128 // 64
    harness.check_output("long")


@NAMES
def test_a_hit_shares_the_blocks_of_the_window(name: str) -> None:
    harness = Harness(layout=WINDOWED[name])
    prompt = tokens(1, 640)
    harness.ask("first", prompt)
    pools = harness.sched.cache.arena.windows
    before = [set(pool.owners) for pool in pools]
    assert harness.ask("again", np.concatenate([prompt, tokens(2, 30)])).cache.num_cached_tokens == 640
    assert (
        all(held <= set(pool.owners) for held, pool in zip(before, pools, strict=True))
        and not harness.sched.stats().cache.moves
    )
    assert harness.ask("shorter", prompt[:639]).cache.num_cached_tokens in (0, 576)


@NAMES
@pytest.mark.parametrize("chance", [0.3, 0.9])
def test_rejected_drafts_find_their_window_again(name: str, chance: float) -> None:
    layout = WINDOWED[name]
    pages = layout.num_pages_for(900, 4) + 2
    harness = Harness(layout=layout, num_pages=pages, most_drafts=63, draft_chance=chance, async_scheduling=True)
    for index in range(6):
        harness.add(f"r{index}", tokens(index % 2, 150 + 60 * index), 190)
    harness.run()
    for index in range(6):
        harness.check_output(f"r{index}")
    assert harness.runner.num_confirmed_drafts and harness.runner.num_optimistic


@NAMES
def test_a_tier_holds_no_more_than_a_request_resumes_from(name: str) -> None:
    """The blocks of the whole path that have no window, once, and for each state the blocks of its windows."""
    layout = WINDOWED[name]
    harness = Harness(layout=layout, num_pages=layout.num_pages_for(1300, 4) + 1, num_host_pages=300)
    for seed in range(4):
        harness.ask(f"r{seed}", tokens(seed, 1200), 2)
    stats, cache = harness.sched.stats().cache, harness.sched.cache
    assert cache.tiers.host is not None and stats.num_host_checkpoints and not cache.tiers.host.store.layout.windows
    of_windows = sum(group.most_of_state * group.block_bytes for group in layout.windows)
    blocks = stats.num_host_blocks * layout.block_bytes
    assert stats.host_stored_bytes == blocks + stats.num_host_checkpoints * (layout.slot_bytes + of_windows)
    loaded = harness.ask("again", np.concatenate([tokens(0, 1200), tokens(9, 30)]), 2).cache
    assert loaded.num_restored_tokens == 1152
