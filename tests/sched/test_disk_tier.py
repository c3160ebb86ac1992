"""The disk tier under the scheduler: the disk answers late or not at all, and answers are those of an uncached run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from forkpoint.cache.eviction import RecomputeCost
from forkpoint.cache.hashing import HashChain
from forkpoint.cache.integrity import check_integrity
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.tier_entries import BLOCK, RECORD, SLOT, DiskFacts
from forkpoint.cache.tiers import TierSizes
from forkpoint.config import CacheConfig
from tests.cache.published import Listener
from tests.sched.harness import HYBRIDS, LAYOUTS, WITH_WINDOWS, Harness, tokens
from tests.sched.test_host_tier import ONE_UNIT, evicted, flood, next_turn, tight


def with_disk(layout: str = "several blocks a page", num_host_pages: int = 0, **options: object) -> Harness:
    given = {"num_disk_pages": 400, "disk_delay": 3, **options}
    return tight(layout, num_host_pages, **given)


def used(harness: Harness) -> tuple[int, int, int]:
    stats = harness.sched.stats().cache
    return stats.disk_hit_tokens, stats.disk_loaded_bytes, stats.disk_stored_bytes


@pytest.mark.parametrize("layout", WITH_WINDOWS)
@pytest.mark.parametrize("loaded_at_once", [0, ONE_UNIT])
@pytest.mark.parametrize("more", [{}, {"async_scheduling": True}, {"most_drafts": 3, "draft_chance": 0.7}], ids=str)
def test_an_evicted_prefix_comes_back(layout: str, loaded_at_once: int, more: dict[str, object]) -> None:
    harness = with_disk(layout, loaded_at_once=loaded_at_once, **more)
    again = harness.ask("again", next_turn(evicted(harness)), 2)
    assert again.cache.num_restored_tokens == again.cache.num_cached_tokens >= 576
    hits, loaded, stored = used(harness)
    assert hits == again.cache.num_restored_tokens and loaded > 0 and stored > 0


@pytest.mark.parametrize("layout", [*HYBRIDS, "states and a window"])
def test_what_leaves_the_host_tier_goes_to_the_disk(layout: str) -> None:
    harness = with_disk(layout, WITH_WINDOWS[layout].in_tiers().num_pages_for(1500, 4) + 1)
    cache = harness.sched.cache
    for seed in range(4):
        evicted(harness, seed)
    prompts = [request.prompt_token_ids for request in harness.requests.values()]
    assert cache.tiers.disk is not None and cache.tiers.host is not None
    chains = [cache.new_lease("look", "", prompt).chain for prompt in prompts]
    fallen = [i for i, chain in enumerate(chains) if cache.tiers.disk.find(chain, 10)]
    cache.tiers.host.reset()  # it may have them too, if they were evicted again
    cache.store.reset()
    again = harness.ask("again", next_turn(prompts[fallen[0]]), 2)
    stats = harness.sched.stats().cache
    assert stats.disk_hit_tokens == again.cache.num_restored_tokens >= 576 and stats.host_stored_bytes > 0


def test_other_requests_go_on_while_the_disk_reads() -> None:
    harness = with_disk(disk_delay=20)
    waiting = harness.add("waits", next_turn(evicted(harness)), 2)
    other = harness.add("other", tokens(5, 65), 6)
    harness.step()
    harness.step()
    assert waiting.first_scheduled_s is None and other.first_scheduled_s is not None
    harness.run()
    harness.check_output("waits")
    harness.check_output("other")
    assert waiting.cache is not None and waiting.cache.num_restored_tokens >= 576


@pytest.mark.parametrize("how", ["abort", "reset", "fail"])
def test_nothing_is_held_after_reads_were_given_up(how: str) -> None:
    harness = with_disk(disk_delay=20)
    harness.add("waits", next_turn(evicted(harness)), 2)
    harness.step()
    disk = harness.sched.cache.tiers.disk
    assert disk is not None and disk.is_reading
    if how == "abort":
        harness.sched.abort("waits")
    elif how == "reset":
        harness.sched.reset_prefix_cache()
    else:
        harness.fail_next = True
    harness.run()
    if how != "abort":
        harness.check_output("waits")
    for seed in range(30):  # results in which the disk reports the rest
        harness.ask(f"later {seed}", tokens(seed, 10), 2)
    assert not disk.is_reading and not harness.runner.disk._buffers
    assert harness.sched.stats().num_pages_held == 0


def test_damaged_entries_are_computed_and_not_read_again() -> None:
    harness = with_disk()
    prompt = evicted(harness)
    harness.runner.disk.fail_chance = 1.0
    assert harness.ask("again", next_turn(prompt), 2).cache.num_restored_tokens == 0
    assert harness.sched.stats().cache.disk_failed_reads > 0
    harness.runner.disk.fail_chance = 0.0
    harness.sched.cache.store.reset()
    assert harness.ask("once more", next_turn(prompt), 2).cache.num_cached_tokens == 0


def test_a_shorter_prefix_is_taken_where_the_end_is_damaged() -> None:
    harness = with_disk(disk_delay=0)
    prompt = tokens(0, 641)
    harness.ask("first", prompt[:321], 2)
    harness.ask("second", prompt, 2)
    flood(harness, prompt)
    disk = harness.runner.disk
    assert harness.sched.cache.tiers.disk is not None
    node = harness.sched.cache.tiers.disk.find(harness.sched.cache.new_lease("look", "", prompt).chain, 10)
    assert node is not None and node.depth == 10
    disk.num_failed += 1  # a write that nobody noticed
    for key, name in list(disk._names.items()):
        if name.hash == node.hash:
            del disk._names[key]
    assert harness.ask("again", next_turn(prompt), 2).cache.num_restored_tokens == 320


def test_a_failed_write_ends_storing_and_nothing_else() -> None:
    harness = with_disk()
    harness.runner.disk.writes = False
    for seed in range(8):
        harness.ask(f"{seed}", tokens(seed, 641), 2)
    stats = harness.sched.stats().cache
    assert stats.disk_failed_writes > 0 and stats.disk_skipped > 0
    assert stats.num_disk_blocks == 0
    stored = stats.disk_stored_bytes
    harness.ask("more", tokens(50, 641), 2)
    assert harness.sched.stats().cache.disk_stored_bytes == stored


def test_the_writes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = with_disk(disk_delay=50)
    layout, disk = harness.layout, harness.sched.cache.tiers.disk
    assert disk is not None
    room = 11 * layout.block_bytes + layout.slot_bytes
    monkeypatch.setattr("forkpoint.cache.disk_tier.UNWRITTEN_AT_ONCE", room)
    most = 0
    for seed in range(8):
        harness.add(f"{seed}", tokens(seed, 641), 2)
        while harness.step():
            most = max(most, disk._unwritten_bytes)
        harness.check_output(f"{seed}")
    assert 0 < most <= room and harness.sched.stats().cache.disk_skipped > 0


def test_a_disk_that_does_not_answer_is_read_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness = with_disk()
    prompt, listener = evicted(harness), Listener(harness.sched.cache)
    listener.check([prompt])
    assert listener.index._resumable["STORAGE"]
    disk = harness.sched.cache.tiers.disk
    assert disk is not None
    with monkeypatch.context() as silent:
        silent.setattr("forkpoint.cache.disk_tier.STALLED_S", 0.02)
        silent.setattr(type(harness.runner.disk), "next_report", lambda self, waits: None)
        assert harness.ask("again", next_turn(prompt), 2).cache.num_cached_tokens == 0
        late = Listener(harness.sched.cache)
        for each in (listener, late):  # routers hear that nothing can be restored from it
            each.check([prompt])
            assert not each.index._resumable["STORAGE"]
        disk._closed_until_s = 0.0
        assert harness.ask("once more", np.concatenate([prompt, tokens(8, 40)]), 2).cache.num_restored_tokens == 0
    assert caplog.text.count("did not answer for") == 1
    disk._closed_until_s = disk._clock() + 60
    assert harness.ask("it answers", tokens(9, 40), 2).cache.num_cached_tokens == 0
    flood(harness, prompt)
    assert not disk.is_open() and harness.ask("too early", next_turn(prompt), 2).cache.num_restored_tokens == 0
    disk._closed_until_s = 0.0
    flood(harness, prompt)
    assert harness.ask("later", next_turn(prompt), 2).cache.num_restored_tokens >= 576
    late.check([prompt])
    assert late.index._resumable["STORAGE"]


@pytest.mark.parametrize("make", [tight, with_disk], ids=["host", "disk"])
def test_salts_stay_apart_in_tiers(make: Callable[[], Harness]) -> None:
    harness = make()
    prompt = evicted(harness, cache_salt="a")
    assert harness.ask("b", next_turn(prompt), 2, cache_salt="b").cache.num_restored_tokens == 0
    assert harness.ask("a", next_turn(prompt), 2, cache_salt="a").cache.num_restored_tokens >= 576


def test_a_state_that_lags_is_complete_before_it_is_stored_at_the_end() -> None:
    """The request ends on a block boundary in a step with drafts, and no plan follows but those of closing. The runner
    refuses to copy a state that lags."""
    harness = Harness(most_drafts=4, draft_chance=1.0, num_disk_pages=400)
    request = harness.add("last", tokens(1, 100), 93)  # 192 tokens are computed
    harness.run()
    assert request.num_draft_tokens and not harness.runner.lags.num_flushes
    while (plan := harness.sched.plan_save()) is not None:
        harness.sched.apply(harness.runner.submit(plan).result())
    assert harness.runner.lags.num_flushes == 1


@pytest.mark.parametrize(("layout", "longest"), [("several blocks a page", 3), ("no keys and values", 6)])
def test_entries_without_the_blocks_before_them_are_left_out(layout: str, longest: int) -> None:
    """A model without attention needs no blocks."""
    chosen, chain = LAYOUTS[layout], HashChain("", "")
    chain.extend(tokens(0, 640))
    blocks, slots = ((1, 2, 3, 5, 6) if chosen.has_kv else ()), (3, 4, 6)  # 4 is missing
    entries = np.zeros(len(blocks) + len(slots), RECORD)
    entries["depth"] = [*blocks, *slots]
    entries["kind"] = [BLOCK] * len(blocks) + [SLOT] * len(slots)
    first_slot = 20 * chosen.slots_per_page  # in pages of their own
    entries["unit"] = [chosen.blocks_per_page + depth for depth in blocks] + [first_slot + depth for depth in slots]
    names = [chain.root, *chain.hashes]
    entries["hash"] = [np.void(names[depth]) for depth in (*blocks, *slots)]
    entries["parent"] = [np.void(names[depth - 1]) for depth in (*blocks, *slots)]
    sizes = TierSizes(disk=DiskFacts(40, entries))
    cache = CacheManager(chosen, 20, CacheConfig(), deterministic=False, cost=RecomputeCost(), tiers=sizes)
    assert cache.tiers.disk is not None
    found = cache.tiers.disk.find(chain, 10)
    assert found is not None and found.depth == longest
    check_integrity(cache, [])
    cache.reset()
    assert cache.tiers.disk.find(chain, 10) is None
