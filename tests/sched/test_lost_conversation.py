"""A conversation whose end gave way goes on: that is no junction. Another history that parts from it is one."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.cache.tree import Checkpoint
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens

LENGTH = 3000


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
    harness = Harness(layout=layout, num_pages=pages)
    prompt = tokens(1, LENGTH)
    harness.ask("turn 1", prompt, 130)
    conversation = np.concatenate([prompt, np.asarray(harness.output("turn 1"), np.int32)])
    fill(harness, conversation)
    return harness, conversation


def checkpoints(harness: Harness, prompt: np.ndarray) -> dict[int, Checkpoint]:
    """Those on the path of a prompt, by position."""
    cache = harness.sched.cache
    lease = cache.new_lease("look", "", prompt)
    path = cache.store.tree.match(lease.chain, len(prompt) // 64)
    return {node.checkpoint.num_tokens: node.checkpoint for node in path if node.checkpoint is not None}


@pytest.mark.parametrize("name", HYBRIDS)
def test_going_on_shows_no_junction(name: str) -> None:
    harness, conversation = lose_first_turn(name)
    before = harness.sched.stats().cache.checkpoints_saved.get("junction", 0)
    turn_2 = np.concatenate([conversation, tokens(2, 300)])
    request = harness.ask("turn 2", turn_2)
    assert request.cache.num_cached_tokens == 0
    assert harness.sched.stats().cache.checkpoints_saved.get("junction", 0) == before
    end = checkpoints(harness, turn_2)[(len(turn_2) - 1) // 64 * 64]
    assert end.num_turns == 1, "the turn that was lost counts"


@pytest.mark.parametrize("name", HYBRIDS)
def test_another_history_shows_one(name: str) -> None:
    """It parts from the lost one in its middle: a third prompt that does the same finds a state there."""
    harness, conversation = lose_first_turn(name)
    shared = conversation[:1600]
    others = [np.concatenate([shared, tokens(seed, 400)]) for seed in (11, 12)]
    assert harness.ask("other 1", others[0]).cache.num_cached_tokens == 0
    assert harness.ask("other 2", others[1]).cache.num_cached_tokens == 1600


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
