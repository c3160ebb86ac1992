"""What the host tier stores before eviction asks for it: the entries that eviction takes next."""

from __future__ import annotations

import pytest

from forkpoint.cache.arena import MoveKind, MoveRoute
from forkpoint.cache.streamed_tier import StreamedHostTier
from forkpoint.cache.tree import Checkpoint, node_of
from tests.sched.harness import HYBRIDS, LAYOUTS, WITH_WINDOWS, Harness, tokens
from tests.sched.test_host_tier import empty_arena, next_turn, tight


@pytest.mark.parametrize("layout", HYBRIDS)
def test_a_long_prefix_is_stored_over_several_plans(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = tight(layout, host_streams=True)
    block_bytes = harness.layout.block_bytes
    monkeypatch.setattr("forkpoint.cache.streamed_tier.AHEAD_AT_ONCE", 2 * block_bytes)
    for share in ("RESERVE_SHARE", "LARGEST_SHARE"):
        monkeypatch.setattr(f"forkpoint.cache.streamed_tier.{share}", 1)  # from the start on
    tier = harness.sched.cache.tiers.host
    assert isinstance(tier, StreamedHostTier)
    tier.stored_at_once = 3 * block_bytes + harness.layout.slot_bytes
    prompt = tokens(0, 641)
    harness.ask("first", prompt, 2)
    for number in range(20):
        harness.ask(f"short {number}", tokens(number, 5), 12)  # its plans store what comes next
        if not harness.sched.cache.store.evict_least():
            break
    empty_arena(harness)
    assert harness.sched.stats().cache.host_skipped == 0
    assert harness.ask("again", next_turn(prompt), 2).cache.num_restored_tokens >= 576


@pytest.mark.parametrize("layout", HYBRIDS)
def test_a_prefix_is_stored_while_its_own_memory_is_still_free(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = WITH_WINDOWS[layout]
    harness = Harness(chosen, num_pages=chosen.num_pages_for(2400, 4), num_host_pages=400, host_streams=True)
    harness.ask("first", tokens(0, 641), 2)
    store, tier = harness.sched.cache.store, harness.sched.cache.tiers.host
    victim = store.next_victims(1)[0]
    assert isinstance(victim, Checkpoint) and tier is not None
    num_own = victim.num_tokens // 64 * chosen.block_bytes // chosen.page_bytes
    monkeypatch.setattr("forkpoint.cache.streamed_tier.LARGEST_SHARE", 1)  # the arena is small
    for num_free, is_stored in ((num_own + 1, False), (num_own, True)):
        monkeypatch.setattr(type(store.arena), "num_free_pages", num_free)
        tier.store_ahead(store)
        assert any(move.route is MoveRoute.STORE for move in store.arena.moves) is is_stored


def test_entries_behind_the_next_one_are_stored_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = LAYOUTS["several blocks a page"]
    harness = Harness(chosen, num_pages=chosen.num_pages_for(2400, 4), num_host_pages=400, host_streams=True)
    harness.ask("first", tokens(0, 641), 2)
    store, tier = harness.sched.cache.store, harness.sched.cache.tiers.host
    assert tier is not None and [node_of(entry).depth for entry in store.next_victims(3)] == [9, 8, 10]
    stored = tier.layout
    monkeypatch.setattr("forkpoint.cache.streamed_tier.AHEAD_AT_ONCE", 2 * stored.slot_bytes + 9 * stored.block_bytes)
    monkeypatch.setattr("forkpoint.cache.streamed_tier.RESERVE_SHARE", 1)
    monkeypatch.setattr(type(store.arena), "num_free_pages", 0)
    plans = list[list[MoveKind]]()
    for _ in range(2):
        tier.store_ahead(store)
        plans.append([move.kind for move in store.arena.moves if move.route is MoveRoute.STORE])
        store.arena.moves.clear()
    assert plans == [[MoveKind.BLOCK] * 9 + [MoveKind.SLOT] * 2, [MoveKind.BLOCK, MoveKind.SLOT]], "two, then the third"


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_eviction_frees_the_bytes_that_are_foreseen(layout: str) -> None:
    harness = Harness(LAYOUTS[layout])
    store, arena, sizes = harness.sched.cache.store, harness.sched.cache.store.arena, harness.layout
    for seed, length in enumerate((641, 200, 1300)):
        harness.ask(f"prompt {seed}", tokens(seed, length), 70)
    while victims := store.next_victims(1):
        foreseen = store.keys.freed_bytes(victims[0])
        before = arena.slots.num_used * sizes.slot_bytes + arena.blocks.num_used * sizes.block_bytes
        assert store.evict_least()
        store._give_blocks(store._evict_dead(1 << 20))
        assert before - foreseen == arena.slots.num_used * sizes.slot_bytes + arena.blocks.num_used * sizes.block_bytes
    assert arena.num_free_pages == arena.num_pages - 1


def test_an_entry_waits_while_those_before_it_free_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = LAYOUTS["several blocks a page"]
    harness = Harness(chosen, num_pages=chosen.num_pages_for(2400, 4), num_host_pages=400, host_streams=True)
    harness.ask("first", tokens(0, 641), 2)
    store, tier = harness.sched.cache.store, harness.sched.cache.tiers.host
    first, second = store.next_victims(2)
    most = store.arena.num_pages // 50 + node_of(second).depth * chosen.block_bytes // chosen.page_bytes
    assert tier is not None and node_of(first).depth > node_of(second).depth
    assert store.keys.freed_bytes(first) >= chosen.page_bytes
    monkeypatch.setattr("forkpoint.cache.streamed_tier.LARGEST_SHARE", 1)  # the arena is small
    monkeypatch.setattr(type(store.arena), "num_free_pages", most)
    tier.store_ahead(store)
    stored = [node.depth for node in tier.store.tree.nodes() if node.checkpoint is not None]
    assert stored == [node_of(first).depth]


def test_a_state_that_its_row_may_renew_is_not_stored_ahead_while_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = LAYOUTS["several blocks a page"]
    harness = Harness(chosen, num_pages=chosen.num_pages_for(2400, 4), num_host_pages=400, host_streams=True)
    harness.ask("first", tokens(0, 641), 2)
    store, tier = harness.sched.cache.store, harness.sched.cache.tiers.host
    assert tier is not None and [node_of(entry).depth for entry in store.next_victims(3)] == [9, 8, 10]
    monkeypatch.setattr(Checkpoint, "is_provisional", True)
    monkeypatch.setattr("forkpoint.cache.streamed_tier.RESERVE_SHARE", 1)
    monkeypatch.setattr(type(store.arena), "num_free_pages", 0)
    tier.store_ahead(store)
    stored = [node.depth for node in tier.store.tree.nodes() if node.checkpoint is not None]
    assert stored == [8, 9], "the state after 10 blocks has one near; the one after 8 has none"
