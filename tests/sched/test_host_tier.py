"""The host tier under the scheduler: what the arena evicts comes back, and answers are those of an uncached run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forkpoint.cache.arena import Move, MoveKind, MoveRoute
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.streamed_tier import StreamedHostTier
from forkpoint.cache.tier_entries import HOST_READY, TierReport
from forkpoint.cache.tree import Node
from forkpoint.sched.request import Request
from tests.cache.published import Listener, sent_hashes
from tests.sched.harness import HYBRIDS, LAYOUTS, WINDOWED, WITH_WINDOWS, Harness, tokens

STREAMS = pytest.mark.parametrize("host_streams", [False, True])
ONE_UNIT = 1  # bytes that a plan may load; the first unit is always copied


def tight(layout: str = "several blocks a page", num_host_pages: int = 400, **options: object) -> Harness:
    """An arena that holds one conversation of 900 tokens and little else."""
    chosen: CacheLayout = WITH_WINDOWS[layout]
    num_pages = chosen.num_pages_for(900, 3) + 1
    return Harness(chosen, num_pages=num_pages, num_host_pages=num_host_pages, **options)  # type: ignore[arg-type]


def in_arena(harness: Harness, prompt: np.ndarray, salt: str = "") -> int:
    cache = harness.sched.cache
    return cache.lookup(cache.new_lease("look", salt, prompt), len(prompt)).num_tokens


def in_tier(harness: Harness, prompt: np.ndarray) -> Node | None:
    cache = harness.sched.cache
    assert cache.tiers.host is not None
    return cache.tiers.host.find(cache.new_lease("look", "", prompt).chain, len(prompt) // 64)


def flood(harness: Harness, prompt: np.ndarray, salt: str = "") -> None:
    """Ask other prompts until the arena has nothing left that a request could reuse of `prompt`."""
    for seed in range(100, 200):
        if not in_arena(harness, prompt, salt):
            return
        harness.ask(f"other {len(harness.requests)}", tokens(seed, 700), 2)
    raise AssertionError("the prompt is still in the arena")


def empty_arena(harness: Harness) -> None:
    """Evict all that eviction can take."""
    store = harness.sched.cache.store
    while store.evict_least():
        pass
    store._give_blocks(store._evict_dead(1 << 20))


def evicted(harness: Harness, seed: int = 0, **options: object) -> np.ndarray:
    """A prompt that was asked once and lies in the host tier alone."""
    prompt = tokens(seed, 641)
    harness.ask(f"first {seed}", prompt, 2, **options)
    flood(harness, prompt, str(options.get("cache_salt", "")))
    return prompt


def next_turn(prompt: np.ndarray, seed: int = 9) -> np.ndarray:
    return np.concatenate([prompt, tokens(seed, 30)])


@pytest.mark.parametrize("layout", sorted(WITH_WINDOWS))
@pytest.mark.parametrize(
    "more",
    [{}, {"loaded_at_once": ONE_UNIT}, {"host_streams": True}, {"most_drafts": 3, "draft_chance": 0.7}],
    ids=str,
)
def test_an_evicted_prefix_comes_back(layout: str, more: dict[str, object]) -> None:
    harness = tight(layout, disk_delay=3, **more)
    prompt = evicted(harness)
    again = harness.ask("again", next_turn(prompt), 2)
    assert again.cache.num_cached_tokens >= 576
    assert again.cache.num_restored_tokens == again.cache.num_cached_tokens
    stats = harness.sched.stats().cache
    assert stats.host_hit_tokens == again.cache.num_restored_tokens
    assert stats.host_loaded_bytes > 0 and stats.host_stored_bytes > 0
    assert stats.num_host_pages == 400 and stats.num_free_host_pages < 399
    loaded = stats.host_loaded_bytes
    once_more = harness.ask("once more", next_turn(prompt, 10), 2)
    assert once_more.cache.num_restored_tokens == 0, "it is in the arena by now"
    assert harness.sched.stats().cache.host_loaded_bytes == loaded


@pytest.mark.parametrize("layout", [*HYBRIDS, *WINDOWED])
def test_only_the_state_is_loaded_where_the_blocks_are_left(layout: str) -> None:
    harness = tight(layout)
    prompt = tokens(0, 641)
    harness.ask("first", prompt, 2)
    store = harness.sched.cache.store
    while in_arena(harness, prompt) and store.evict_least():  # states go, blocks stay until their room is needed
        pass
    before = harness.sched.stats().cache
    again = harness.ask("again", next_turn(prompt), 2)
    after = harness.sched.stats().cache
    assert again.cache.num_restored_tokens >= 576
    assert after.host_loaded_bytes - before.host_loaded_bytes == harness.layout.in_tiers().slot_bytes


def test_nothing_is_loaded_that_the_request_cannot_resume_from() -> None:
    """Neither blocks that no state follows, nor a state with no token after it."""
    harness = tight()
    prompt, layout = evicted(harness), harness.layout
    empty_arena(harness)
    before = harness.sched.stats().cache.host_loaded_bytes
    assert harness.ask("half", np.concatenate([prompt[:320], tokens(4, 100)]), 2).cache.num_restored_tokens == 0
    assert harness.sched.stats().cache.host_loaded_bytes == before
    whole = harness.ask("whole blocks", prompt[:640], 2).cache  # the request before it left 5 blocks and their state
    assert (whole.num_cached_tokens, whole.num_restored_tokens) == (576, 256)
    loaded = harness.sched.stats().cache.host_loaded_bytes - before
    assert loaded == 4 * layout.block_bytes + layout.slot_bytes


def test_a_request_that_waits_for_copies_holds_up_nobody() -> None:
    harness = tight(loaded_at_once=ONE_UNIT, num_host_pages=400)
    harness.runner.protected_slots = harness.runner.protected_blocks = ()
    prompt = evicted(harness)
    waiting = harness.add("waits", next_turn(prompt), 2)
    other = harness.add("other", tokens(5, 65), 4)
    harness.step()
    assert waiting.first_scheduled_s is None and other.first_scheduled_s is not None
    harness.run()
    harness.check_output("waits")
    harness.check_output("other")
    assert waiting.cache is not None and waiting.cache.num_restored_tokens >= 576


def test_nothing_is_stored_before_the_memory_is_ready() -> None:
    harness = tight(host_streams=True)
    cache = harness.sched.cache
    assert isinstance(cache.tiers.host, StreamedHostTier)
    cache.tiers.host.is_ready = False
    evicted(harness)
    stats = harness.sched.stats().cache
    assert stats.host_stored_bytes == 0 and stats.host_skipped > 0
    cache.tiers.apply_reports(TierReport((HOST_READY,)), None)
    evicted(harness, 1)
    assert harness.sched.stats().cache.host_stored_bytes > 0


@STREAMS
def test_requests_of_one_prefix_share_its_copies(host_streams: bool) -> None:
    harness = tight(loaded_at_once=ONE_UNIT, host_streams=host_streams)
    prompt = evicted(harness)
    before = harness.sched.stats().cache.host_loaded_bytes
    for seed in range(4):
        harness.add(f"copy {seed}", next_turn(prompt, 20 + seed), 2)
    harness.run()
    for seed in range(4):
        harness.check_output(f"copy {seed}")
        assert harness.requests[f"copy {seed}"].cache.num_cached_tokens >= 576
    loaded = harness.sched.stats().cache.host_loaded_bytes - before
    assert loaded <= 10 * harness.layout.block_bytes + harness.layout.slot_bytes


def begin(harness: Harness, **options: object) -> Request:
    """A request whose prefix is on its way."""
    request = harness.add("waits", next_turn(evicted(harness)), 2, **options)
    harness.step()
    restoring = harness.sched.cache.tiers.restoring
    assert restoring.current is not None and not restoring.current.is_complete
    return request


@STREAMS
@pytest.mark.parametrize("how", ["abort", "reset", "fail", "suspend"])
def test_nothing_is_held_after_a_restore_was_given_up(how: str, host_streams: bool) -> None:
    harness = tight(loaded_at_once=ONE_UNIT, host_streams=host_streams, disk_delay=5)
    begin(harness)
    if how == "abort":
        harness.sched.abort("waits")
    elif how == "reset":
        harness.sched.reset_prefix_cache()
    elif how == "fail":
        harness.fail_next = True
    else:
        restoring = harness.sched.cache.tiers.restoring
        while restoring.current is not None and restoring.current.node.depth < 8:
            harness.step()
        longest = max(filter(harness.sched.cache.room.ever_fits, range(4096)))  # needs what the restore holds
        urgent = harness.add("urgent", tokens(7, longest - 2), 2, priority=-1)
        harness.step()
        assert urgent.first_scheduled_s is not None and harness.requests["waits"].first_scheduled_s is None
    harness.run()
    if how != "abort":
        harness.check_output("waits")
    if how == "suspend":
        harness.check_output("urgent")
    stats = harness.sched.stats()
    assert stats.num_running == stats.num_waiting == stats.num_pages_held == 0
    harness.sched.check_integrity()


def test_a_restored_prefix_stays_until_its_request_runs() -> None:
    harness = tight(loaded_at_once=ONE_UNIT)
    waiting, restoring = begin(harness), harness.sched.cache.tiers.restoring
    assert restoring.current is not None
    restoring.loaded_at_once = 1 << 30
    restoring.begin_plan(is_busy=False)
    assert restoring.advance(), "the copies are for the next plan"
    empty_arena(harness)
    assert in_arena(harness, waiting.prompt_token_ids) == 640
    harness.run()
    harness.check_output("waits")
    assert waiting.cache is not None and waiting.cache.num_restored_tokens == 640


def test_a_reset_reaches_the_host_tier() -> None:
    harness = tight()
    prompt = evicted(harness)
    harness.sched.reset_prefix_cache()
    assert in_tier(harness, prompt) is None
    assert harness.ask("again", next_turn(prompt), 2).cache.num_cached_tokens == 0
    stats = harness.sched.stats().cache
    assert stats.num_free_host_pages == stats.num_host_pages - 1 - (stats.num_host_blocks > 0)


def test_garbage_leaves_the_host_tier_with_the_request_that_made_it() -> None:
    harness = tight()
    prompt = tokens(0, 641)
    bad = harness.add("bad", prompt, 60)
    while not bad.output_token_ids:
        harness.step()
    assert harness.sched.cache.tiers.host is not None
    for node in harness.sched.cache.store.tree.nodes():
        harness.sched.cache.tiers.host.keep(node.checkpoint or node, MoveRoute.STORE)  # as if it had been evicted
    assert in_tier(harness, prompt) is not None
    harness.runner.non_finite_requests.add("bad")
    harness.run()
    assert in_tier(harness, prompt) is None


def test_a_restored_copy_of_garbage_is_not_found_either() -> None:
    harness = tight()
    prompt = tokens(0, 641)
    bad = harness.add("bad", prompt, 60)
    while not bad.output_token_ids:
        harness.step()
    harness.sched._departures.preempt(harness.sched._running.requests[0])
    empty_arena(harness)
    while bad.resume_cache is None:
        harness.step()
    assert bad.resume_cache.num_restored_tokens > 0
    harness.runner.non_finite_requests.add("bad")
    harness.run()
    assert in_arena(harness, prompt) == 0 and in_tier(harness, prompt) is None


def test_answers_that_one_request_alone_can_find_are_not_stored() -> None:
    harness = tight(deterministic=True)
    request = harness.add("first", tokens(0, 120), 200)
    while len(request.output_token_ids) < 150:
        harness.step()
    tier, nodes = harness.sched.cache.tiers.host, list(harness.sched.cache.store.tree.nodes())
    assert tier is not None and max(node.depth for node in nodes) == 4
    for node in nodes:
        tier.keep(node.checkpoint or node, MoveRoute.STORE)
    assert [node.depth for node in tier.store.tree.nodes()] == [1]
    harness.run()


@pytest.mark.parametrize("layout", ["several slots a page", "one each"])
def test_a_restore_gives_its_memory_to_running_requests(layout: str) -> None:
    harness = tight(layout, loaded_at_once=ONE_UNIT)
    prompt = evicted(harness)
    harness.add("running", tokens(1, 100), 600)
    harness.step()
    harness.add("waits", next_turn(prompt), 2)
    restoring = harness.sched.cache.tiers.restoring
    while restoring.current is None or restoring.current.node.depth < 9:
        harness.step()
    restoring.loaded_at_once = 0  # the copies stop, and the other request needs the memory before they go on
    while restoring.current is not None:
        assert harness.step()
    restoring.loaded_at_once = ONE_UNIT
    harness.run()
    harness.check_output("running")
    harness.check_output("waits")


@STREAMS
def test_a_restore_gives_way_to_an_earlier_request_that_shares_only_its_blocks(host_streams: bool) -> None:
    """The blocks that the restore holds seem to be of use to the other request, until its lookup finds no prefix."""
    harness = tight("several slots a page", loaded_at_once=ONE_UNIT, host_streams=host_streams)
    waiting, restoring = begin(harness), harness.sched.cache.tiers.restoring
    while restoring.current is not None and restoring.current.node.depth < 8:
        harness.step()
    assert restoring.current is not None
    urgent = harness.add("urgent", waiting.prompt_token_ids, 2, priority=-1, prompt_logprobs=0)  # reads no cache
    harness.step()
    assert urgent.first_scheduled_s is not None and waiting.first_scheduled_s is None
    harness.run()
    harness.check_output("waits")
    harness.check_output("urgent")


def test_a_late_host_tier_is_not_published_until_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = tight(host_streams=True)
    prompt, tier, listener = evicted(harness), harness.sched.cache.tiers.host, Listener(harness.sched.cache)
    assert isinstance(tier, StreamedHostTier)
    now = [100.0]
    tier._clock = tier._reader._clock = tier._choice._clock = lambda: now[0]
    begun = harness.add("waits", next_turn(prompt), 2)
    monkeypatch.setattr(type(harness.runner.disk), "next_report", lambda self, waits: None)
    harness.step()
    listener.check([prompt])
    assert listener.index.restorable(sent_hashes(prompt)) == 10
    now[0] += 10.0
    harness.run()
    assert begun.cache is not None and begun.cache.num_restored_tokens == 0
    empty_arena(harness)
    harness.ask("more", tokens(5, 300), 2)
    listener.check([prompt, tokens(5, 300)])
    assert listener.index.restorable(sent_hashes(prompt)) == 0
    now[0] += 100.0
    listener.check([prompt])
    assert listener.index.restorable(sent_hashes(prompt)) == 10


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@STREAMS
def test_a_tier_that_overflows_stays_right(layout: str, host_streams: bool) -> None:
    chosen = LAYOUTS[layout]
    harness = tight(layout, num_host_pages=chosen.num_pages_for(700, 1) + 1, host_streams=host_streams, disk_delay=2)
    prompts = [tokens(seed, 641) for seed in range(6)]
    for index, prompt in enumerate(prompts):
        harness.ask(f"first {index}", prompt, 2)
    flood(harness, prompts[-1])
    stats, tier = harness.sched.stats().cache, harness.sched.cache.tiers.host
    assert tier is not None
    assert (
        stats.host_skipped + sum(tier.store.counters.checkpoints_evicted.values()) + tier.store.counters.blocks_evicted
    )
    for index, prompt in enumerate(prompts):
        harness.ask(f"again {index}", next_turn(prompt, 30 + index), 2)


def test_an_entry_does_not_evict_what_is_worth_more() -> None:
    layout = LAYOUTS["several blocks a page"]
    harness = tight(num_host_pages=layout.num_pages_for(700, 1) + 1)
    prompt = evicted(harness)
    for number in range(4):
        assert harness.ask(f"again {number}", next_turn(prompt, number), 2).cache.num_cached_tokens >= 576
        flood(harness, prompt)
    for seed in range(2):
        harness.ask(f"once {seed}", tokens(50 + seed, 641), 2)
        empty_arena(harness)
    assert in_tier(harness, prompt) is not None and harness.sched.stats().cache.host_skipped > 0


def test_a_prefix_that_the_tier_cannot_hold_is_not_stored() -> None:
    layout = LAYOUTS["several blocks a page"]
    harness = tight(num_host_pages=layout.num_pages_for(300, 1) + 1)
    prompt = tokens(0, 641)
    harness.ask("first", prompt, 2)
    flood(harness, prompt)
    stats = harness.sched.stats().cache
    assert stats.host_skipped > 0 and in_tier(harness, prompt) is None


def test_blocks_are_loaded_from_where_the_tier_moved_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking blocks of the arena may evict entries to the tier, which compacts it."""
    harness = tight()
    prompt = evicted(harness)
    cache = harness.sched.cache
    tier, restoring = cache.tiers.host, cache.tiers.restoring
    assert tier is not None
    source, store, pool, moves = in_tier(harness, prompt), cache.store, tier.arena.blocks, cache.arena.moves
    take_blocks, num_moved = store.take_blocks, 0

    def take_and_move(*given: Any) -> list[int]:
        nonlocal num_moved
        taken, node = take_blocks(*given), source
        while restoring.current is not None and node is not None and node.depth:
            (block,) = pool.take(node, 1) or [0]
            if not block:
                break
            moves.append(Move(MoveKind.BLOCK, node.block, block, MoveRoute.HOST))
            assert not pool.give([node.block])
            node.rebind(moves[-1])
            num_moved += 1
            node = node.parent
        return taken

    monkeypatch.setattr(store, "take_blocks", take_and_move)
    assert harness.ask("again", next_turn(prompt), 2).cache.num_restored_tokens >= 576
    assert num_moved


def test_a_private_path_that_is_evicted_leaves_no_empty_root() -> None:
    """In deterministic mode a tier keeps none of a running request's own blocks, be it the first of its salt."""
    harness = tight(deterministic=True)
    harness.add("writes", tokens(0, 10), 300)
    for _ in range(260):
        harness.step()
    empty_arena(harness)
    harness.sched.check_integrity()
