"""Rates of reuse, learnt from simulated entries whose chances are known, against brute force."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.reuse import (
    EDGES,
    LOST_SHARE_START,
    NUM_BINS,
    NUM_TRACKED,
    ReuseClass,
    ReuseKind,
    ReuseModel,
    Turn,
    age_bin,
    next_edge,
)

MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise(EDGES)]


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


@dataclass(frozen=True)
class Habit:
    """How entries are used again: with that chance, after a time between `low` and `high`."""

    chance: float
    low: float
    high: float

    def earnings(self, age: float) -> float:
        """Uses for the time held, from `age` on, at the best age to give an entry up; in small steps."""
        times = np.linspace(self.low, self.high, 4001)[1:] - (self.high - self.low) / 8000
        weights = np.full(times.size, self.chance / times.size)
        alive = times > age
        unused = 1 - weights[~alive].sum()
        best = 0.0
        for end in np.linspace(age, max(self.high, age) + 1e-3, 200)[1:]:
            before = alive & (times <= end)
            used = weights[before].sum() / unused
            held = (weights[before] * (times[before] - age)).sum() / unused + (1 - used) * (end - age)
            best = max(best, used / held)
        return best


def learn(habits: dict[int, Habit], count: int) -> ReuseModel:
    """Entries start at an even pace over 20 arenas, the classes (numbers of uses so far) in turn."""
    model, rng = ReuseModel(), np.random.default_rng(0)
    asks: list[tuple[float, int]] = []
    for number in range(count):
        now = number * 20.0 / count
        while asks and asks[0][0] <= now:
            when, which = heapq.heappop(asks)
            model.advance(when)
            model.use(name(which), when, lost=False)
        model.advance(now)
        uses = number % len(habits)
        model.track(name(number), ReuseClass(ReuseKind.CONVERSATION, uses), now)
        habit = habits[uses]
        if rng.random() < habit.chance:
            heapq.heappush(asks, (now + rng.uniform(habit.low, habit.high), number))
    return model


@pytest.mark.parametrize("habit", [Habit(0.3, 0.0, 0.5), Habit(0.6, 0.25, 1.0), Habit(0.2, 1.0, 2.0)], ids=str)
def test_it_learns_what_entries_earn(habit: Habit) -> None:
    """Within bins the rate is taken to be even; the simulated habit fills whole bins, so that little is lost."""
    model = learn({0: habit}, 6000)
    for age in (0.0, 0.2, 0.3, 0.6):
        if age < habit.high:
            truth = habit.earnings(EDGES[age_bin(age)])
            assert model.earnings(ReuseClass(ReuseKind.CONVERSATION, 0), age) == pytest.approx(truth, rel=0.3), age


def test_an_entry_about_to_be_used_is_worth_most() -> None:
    """Uses fall between half an arena and one: the longer an entry has waited the better, until they are over."""
    model = learn({0: Habit(0.8, 0.5, 1.0)}, 4000)
    earned = [model.earnings(ReuseClass(ReuseKind.CONVERSATION, 0), age) for age in MIDDLES]
    top = age_bin(0.75)
    assert earned[: top + 1] == sorted(earned[: top + 1]) and earned[top] > 2 * earned[0]
    assert earned[top + 1] < 0.2 * earned[top]


def test_uses_so_far_tell_entries_apart() -> None:
    model = learn({0: Habit(0.1, 0.0, 1.0), 1: Habit(0.8, 0.0, 1.0)}, 6000)
    once, never = (model.earnings(ReuseClass(ReuseKind.CONVERSATION, uses), 0.0) for uses in (1, 0))
    assert once / never > 4


def test_sizes_of_turns_tell_entries_apart() -> None:
    """Of one number of turns, those that added a handful of tokens go on and long ones do not; a size that was hardly
    seen is taken to be as the others are."""
    model = ReuseModel()
    small, large, rare = (
        ReuseClass.of_turn(ReuseKind.CONVERSATION, Turn(1, num_new_tokens)) for num_new_tokens in (40, 5000, 500)
    )
    assert len({small, large, rare}) == 3
    for number in range(600):
        now = number / 30
        model.advance(now)
        model.track(name(number), small if number % 2 else large, now)
        if number >= 10 and number % 2:
            model.use(name(number - 10), now, lost=False)
    model.advance(25.0)
    earned = [model.earnings(reuse_class, 0.0) for reuse_class in (small, rare, large)]
    assert earned[0] > 1.5 * earned[1] and earned[1] > 5 * earned[2]


def test_tools_are_taken_to_answer_at_once() -> None:
    """Before anything is seen: a conversation that waits for one is worth more than one that waits for a person, until
    it has waited for long."""
    model = ReuseModel()
    tool, person = ReuseClass(ReuseKind.TOOL_CALL, 3), ReuseClass(ReuseKind.CONVERSATION, 3)
    assert model.earnings(tool, 0.0) > 5 * model.earnings(person, 0.0)
    assert model.earnings(tool, 5.0) < model.earnings(person, 5.0)


def test_kinds_are_learnt_apart() -> None:
    model = learn({0: Habit(0.9, 0.0, 0.25)}, 3000)
    fresh = ReuseModel()
    learnt = ReuseClass(ReuseKind.CONVERSATION)
    assert model.earnings(learnt, 0.0) > 2 * fresh.earnings(learnt, 0.0)
    for kind in set(ReuseKind) - {ReuseKind.CONVERSATION}:
        other = ReuseClass(kind, 1)
        assert [model.earnings(other, age) for age in MIDDLES] == [fresh.earnings(other, age) for age in MIDDLES]


def test_entries_that_gave_way_are_learnt_from() -> None:
    """Nothing is held for longer than 0.2 arenas, and what comes back later is seen all the same."""
    model = ReuseModel()
    for number in range(400):
        now = number / 20
        model.track(name(number), ReuseClass(ReuseKind.CONVERSATION), now)
        if number >= 12:
            model.advance(now)
            assert model.waits_for(name(number - 12))
            assert model.use(name(number - 12), now, lost=True) == 1
    earned = [model.earnings(ReuseClass(ReuseKind.CONVERSATION, 0), age) for age in MIDDLES]
    assert int(np.argmax(earned)) == age_bin(0.6) and model.lost_ends.value > 0.99


def test_before_anything_is_seen_an_entry_of_some_age_is_worth_as_much_as_a_new_one() -> None:
    """Up to an arena; then less and less. Of keys and values alone the newer ones are worth more from the start."""
    model = ReuseModel()
    earned = [model.earnings(ReuseClass(ReuseKind.CONVERSATION, 0), age) for age in MIDDLES]
    below = age_bin(1.0)
    assert max(earned[:below]) < 1.4 * min(earned[:below])
    assert earned[below:] == sorted(earned[below:], reverse=True) and earned[below] < 0.5 * earned[below - 1]
    blocks = [model.earnings(ReuseClass(ReuseKind.BLOCK, 0), age) for age in MIDDLES]
    assert blocks[1:] == sorted(blocks[1:], reverse=True) and blocks[0] > 0.95 * blocks[1]


def test_the_share_of_lost_conversations() -> None:
    model, shares = ReuseModel(), []
    for number in range(60):
        model.track(name(number), ReuseClass(ReuseKind.CONVERSATION, number % 3), 0.0)
        model.use(name(number), 0.1, lost=number < 30)
        shares.append(model.lost_ends.value)
    assert shares[0] == (1 + LOST_SHARE_START) / 2 and shares[29] > 0.95  # the first return counts half
    assert shares[29:] == sorted(shares[29:], reverse=True) and shares[-1] < 0.1


def test_the_share_that_parts_near_the_end() -> None:
    """Of the conversations that come back; states of other kinds do not count."""
    model = ReuseModel()
    kinds = {ReuseKind.NEAR_END: 60, ReuseKind.CONVERSATION: 200, ReuseKind.TOOL_CALL: 140, ReuseKind.SPARSE: 300}
    assumed = model.near_end_share
    assert assumed == ReuseKind.NEAR_END.assumed_chance(0)
    for number, kind in enumerate(kind for kind, count in kinds.items() for _ in range(count)):
        model.track(name(number), ReuseClass(kind), 0.0)
        model.use(name(number), 0.1, lost=number % 2 == 0)
    for step in range(1, 2 * len(ReuseKind)):  # each kind is taken in
        model.advance(step / 8)
    assert model.near_end_share == pytest.approx((60 + 50 * assumed) / (400 + 50), rel=0.02)


def test_the_share_of_lost_fallbacks() -> None:
    """Counted for conversations that had several: the deepest of them was there, or was not."""
    model = ReuseModel()
    model.use_fallback(name(1), [name(2)])
    assert model.lost_fallbacks.value == LOST_SHARE_START, "none of them had several"
    model.track_fallback(name(1))
    model.use_fallback(name(1), [name(2)])
    first = model.lost_fallbacks.value
    assert first == LOST_SHARE_START / 2
    model.use_fallback(None, [name(0), name(1), name(2)])
    assert model.lost_fallbacks.value == pytest.approx(first + (1 - first) / 3)
    model.use_fallback(None, [name(0), name(1), name(2)])  # it was found gone before
    assert model.lost_fallbacks.value == pytest.approx(first + (1 - first) / 3)


def test_what_is_told_of_a_return() -> None:
    model = ReuseModel()
    model.track(name(1), ReuseClass(ReuseKind.CONVERSATION, 3), 0.0)
    model.track(name(2), ReuseClass(ReuseKind.JUNCTION, 3), 0.0)
    assert model.use(name(1), 0.5, lost=True) == 4  # turns, this one included
    assert model.use(name(1), 0.5, lost=True) is None  # once
    assert model.use(name(2), 0.5, lost=True) is None  # no conversation
    assert not model.waits_for(name(1)) and not model.waits_for(name(2))


def test_a_bounded_number_is_waited_for() -> None:
    model = ReuseModel()
    for number in range(NUM_TRACKED + 10):
        model.track(name(number), ReuseClass(ReuseKind.PERIODIC), number / NUM_TRACKED)
    assert not model.waits_for(name(9)) and model.waits_for(name(10))
    model.forget(name(10))
    model.clear()
    assert not model.waits_for(name(11))


@given(st.floats(0, 40))
def test_ages_and_edges(age: float) -> None:
    edge, bin_now = next_edge(age), age_bin(age)
    assert EDGES[bin_now] <= age + 1e-5
    if edge == float("inf"):
        assert bin_now == NUM_BINS - 1
    else:
        assert age < edge and age_bin(edge) == bin_now + 1 and age_bin(edge - 1e-5) == bin_now
