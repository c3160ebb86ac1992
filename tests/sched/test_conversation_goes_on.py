"""What the states of a conversation are worth, to one another and from turn to turn."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.cache.hazards import EndKind
from forkpoint.cache.learnt import ConversationTurn, class_of
from forkpoint.cache.tree import Checkpoint, Origin
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens

LENGTH = 3000


def near_end_of(found: dict[int, Checkpoint]) -> Checkpoint:
    [state] = [c for c in found.values() if c.origin is Origin.NEAR_END and not c.superseded]
    return state


def turn_2_of(harness: Harness, prompt: np.ndarray, keep: int | None = None) -> np.ndarray:
    """The conversation goes on; with `keep` from its first tokens alone, what came after them edited."""
    said = np.concatenate([prompt, np.asarray(harness.output("turn 1"), np.int32)])
    return np.concatenate([said[:keep], tokens(2, 300)])


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_near_the_end_is_worth_a_share_of_its_conversation(name: str) -> None:
    """It is of use when the conversation comes back: sooner where a tool answers, less and less as it waits."""
    layout, prompt = LAYOUTS[name], tokens(1, LENGTH)
    worth = {}
    for opening in (None, 5):  # the number of the output that opens a tool call
        harness = Harness(layout=layout)
        outputs = harness.runner.expected(prompt.tolist(), 9)
        calls = frozenset() if opening is None else frozenset(outputs[opening : opening + 1])
        harness.ask("turn 1", prompt, 9, tool_call_token_ids=calls)
        store = harness.sched.cache.store
        near_end = near_end_of(harness.checkpoints(prompt))
        assert near_end.note == ConversationTurn(0, awaits_tool=opening is not None)
        worth[opening] = store.keys.of(near_end)
    assert worth[5] > 2 * worth[None] > 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_earlier_turns_ends_are_superseded(name: str) -> None:
    """The state at the end of the first prompt, and the one near it, were for those who ask again at that point."""
    harness, prompt = Harness(layout=LAYOUTS[name]), tokens(1, LENGTH)
    harness.ask("turn 1", prompt, 130)
    first = {c: class_of(c).kind for c in harness.checkpoints(prompt).values()}
    assert Origin.PROMPT_END in first.values() and Origin.NEAR_END in first.values()
    turn_2 = turn_2_of(harness, prompt)
    harness.ask("turn 2", turn_2, 130)
    for checkpoint, kind in first.items():
        if kind in (Origin.PROMPT_END, Origin.NEAR_END):
            assert checkpoint.superseded and class_of(checkpoint).kind is EndKind.SUPERSEDED
    assert not near_end_of(harness.checkpoints(turn_2)).superseded


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_that_comes_back_edited_keeps_its_turns(name: str) -> None:
    harness, prompt = Harness(layout=LAYOUTS[name]), tokens(1, LENGTH)
    harness.ask("turn 1", prompt, 4)
    near_end = near_end_of(harness.checkpoints(prompt))
    turn_2 = turn_2_of(harness, prompt, keep=near_end.num_tokens + 10)
    assert harness.ask("turn 2", turn_2).cache.num_cached_tokens == near_end.num_tokens
    assert harness.checkpoints(turn_2)[(len(turn_2) - 1) // 64 * 64].note == ConversationTurn(1)
    assert near_end.superseded


@pytest.mark.parametrize("name", HYBRIDS)
def test_declared_states_stay_as_long_as_their_conversation(name: str) -> None:
    harness, prompt = Harness(layout=LAYOUTS[name]), tokens(1, LENGTH)
    harness.ask("turn 1", prompt, 4, breakpoints=(1300,))
    declared = harness.checkpoints(prompt)[1280]
    used = declared.last_used
    harness.ask("another", tokens(3, LENGTH), 4)
    assert declared.last_used == used
    harness.ask("turn 2", turn_2_of(harness, prompt), 4)
    assert declared.origin is Origin.BREAKPOINT and declared.last_used == harness.sched.cache.arena.turnover
    assert declared.note == ConversationTurn(1)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_turn_too_short_for_a_block_counts(name: str) -> None:
    """It leaves no state of its own: the one that it went on from still ends the conversation, now of its class."""
    harness, prompt = Harness(layout=LAYOUTS[name]), tokens(1, 3010)
    harness.ask("turn 1", prompt)
    [end] = [c for c in harness.checkpoints(prompt).values() if c.num_tokens == 3008]
    assert end.note == ConversationTurn(0)
    turn_2 = np.concatenate([prompt, np.asarray(harness.output("turn 1"), np.int32), tokens(2, 5)])
    calls = frozenset(harness.runner.expected(turn_2.tolist(), 1))
    harness.ask("turn 2", turn_2, tool_call_token_ids=calls)
    assert not end.superseded
    assert end.note == ConversationTurn(1, awaits_tool=True)
    assert class_of(end).kind is EndKind.TOOL_CALL
