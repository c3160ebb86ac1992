"""A conversation whose end gave way goes on: that is no junction. Another history that parts from it is one."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.cache.hazards import EndKind
from forkpoint.cache.learnt import ConversationTurn, class_of
from forkpoint.cache.tree import Origin
from forkpoint.config import CacheConfig
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens

LENGTH = 3000
NO_PERIODIC = CacheConfig(checkpoint_interval=0)  # small slots would be taken by states at every boundary


def fill(harness: Harness, conversation: np.ndarray) -> None:
    """Ask unrelated prompts until nothing of the conversation can be reused."""
    cache = harness.sched.cache
    for number in range(200):
        lease = cache.new_lease("look", "", conversation)
        if cache.lookup(lease, len(conversation)).num_tokens == 0:
            return
        harness.ask(f"unrelated {number}", tokens(5000 + number, LENGTH))
    raise AssertionError("the conversation did not give way")


def lose_first_turn(name: str) -> tuple[Harness, np.ndarray]:
    layout = LAYOUTS[name]
    pages = layout.num_pages_for(2 * LENGTH, 12) + 1
    harness = Harness(layout=layout, num_pages=pages, cache=NO_PERIODIC)
    prompt = tokens(1, LENGTH)
    harness.ask("turn 1", prompt, 130)
    conversation = np.concatenate([prompt, np.asarray(harness.output("turn 1"), np.int32)])
    fill(harness, conversation)
    return harness, conversation


@pytest.mark.parametrize("name", HYBRIDS)
def test_going_on_shows_no_junction(name: str) -> None:
    harness, conversation = lose_first_turn(name)
    before = harness.sched.stats().cache.checkpoints_saved.get("junction", 0)
    turn_2 = np.concatenate([conversation, tokens(2, 300)])
    request = harness.ask("turn 2", turn_2)
    assert request.cache.num_cached_tokens == 0
    assert harness.sched.stats().cache.checkpoints_saved.get("junction", 0) == before
    end = harness.checkpoints(turn_2)[(len(turn_2) - 1) // 64 * 64]
    assert end.note == ConversationTurn(1), "the turn that was lost counts"


@pytest.mark.parametrize("name", HYBRIDS)
def test_another_history_shows_one(name: str) -> None:
    """It parts from the lost one in its middle: a third prompt that does the same finds a state there."""
    harness, conversation = lose_first_turn(name)
    shared = conversation[:1600]
    others = [np.concatenate([shared, tokens(seed, 400)]) for seed in (11, 12)]
    assert harness.ask("other 1", others[0]).cache.num_cached_tokens == 0
    assert harness.ask("other 2", others[1]).cache.num_cached_tokens == 1600


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_is_left_stands_in_for_the_end(name: str) -> None:
    """A short answer ends a block behind the state near the prompt's end: the end is hardly worth a slot beside that.
    Once it has given way that state is worth what the end alone would have been, until the conversation goes on."""
    layout = LAYOUTS[name]
    harness = Harness(layout=layout, cache=NO_PERIODIC)
    store, prompt = harness.sched.cache.store, tokens(1, LENGTH)
    harness.ask("turn 1", prompt, 4)
    end, near_end = (harness.checkpoints(prompt)[position] for position in (2944, 2880))
    assert near_end.origin is Origin.NEAR_END and near_end.note == ConversationTurn()
    harness.ask("unrelated", tokens(5000, LENGTH), 4)
    while not end.removed:
        assert store.evict_least()
    assert not near_end.removed and near_end.note == ConversationTurn(stands_in_for=class_of(end))
    worth = store.keys.of(near_end)
    turn_2 = np.concatenate([prompt, np.asarray(harness.output("turn 1"), np.int32), tokens(2, 300)])
    assert harness.ask("turn 2", turn_2).cache.num_cached_tokens == 2880
    assert near_end.note == ConversationTurn(), "the conversation went on"
    assert store.keys.of(near_end) < worth / 2
    assert harness.checkpoints(turn_2)[(len(turn_2) - 1) // 64 * 64].note == ConversationTurn(1)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_fallback_ends_no_conversation(name: str) -> None:
    """One that goes while the end is there leaves nothing to stand in for."""
    layout = LAYOUTS[name]
    harness = Harness(layout=layout, num_pages=layout.num_pages_for(LENGTH, 8) + 1, cache=NO_PERIODIC)
    prompt = tokens(1, LENGTH)
    harness.ask("turn 1", prompt, 4)
    kept = harness.checkpoints(prompt)
    fallbacks = [checkpoint for checkpoint in kept.values() if checkpoint.origin is Origin.FALLBACK]
    end = kept[max(kept)]
    policy, above = harness.sched.cache.store.policy, kept[min(kept)]
    assert fallbacks and not any(policy.evicted(fallback, above) for fallback in fallbacks)
    assert policy.evicted(end, above)


def test_a_conversation_that_waits_for_a_tool() -> None:
    """Its end is of a kind of its own, whichever states it left; a request that ended otherwise waits for none."""
    harness, prompts = Harness(), [tokens(seed, 300) for seed in (1, 2)]
    opening = frozenset(harness.runner.expected(prompts[0].tolist(), 100)[50:51])
    for name, prompt in zip("ab", prompts, strict=True):
        request = harness.ask(name, prompt, 100, tool_call_token_ids=opening)
        end = max(harness.checkpoints(request.all_token_ids()).items())[1]
        wanted = EndKind.TOOL_CALL if request.awaits_tool else Origin.DECODE
        assert end.num_tokens == 384 and class_of(end).kind is wanted
    assert harness.requests["a"].awaits_tool and not harness.requests["b"].awaits_tool


def test_an_end_that_found_no_room_is_known_all_the_same() -> None:
    """A prompt that fills the arena leaves no slot for its end's state; still its next turn shows no junction."""
    layout = LAYOUTS["several blocks a page"]
    harness = Harness(layout=layout, num_pages=layout.num_pages_for(LENGTH, 1) + 1)
    prompt = tokens(1, LENGTH - 60)
    harness.ask("turn 1", prompt, 4)
    assert harness.sched.stats().cache.checkpoints_skipped["prompt_end"] == 1
    turn_2 = np.concatenate([prompt, np.asarray(harness.output("turn 1"), np.int32), tokens(2, 40)])
    cache = harness.sched.cache
    lease = cache.new_lease("look", "", turn_2)
    hit = cache.lookup(lease, len(turn_2))
    assert hit.junctions and not cache.count_query(lease, len(turn_2), hit)
