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
from forkpoint.cache.hazards import EDGES, NUM_BINS, NUM_TRACKED, EndKind, HazardModel, ReuseClass, age_bin, next_edge
from forkpoint.cache.learnt import PRIORS
from forkpoint.cache.tree import Origin

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


def learn(habits: dict[int, Habit], count: int) -> HazardModel:
    """Entries start at an even pace over 20 arenas, the classes (numbers of uses so far) in turn."""
    model, rng = HazardModel(PRIORS), np.random.default_rng(0)
    asks: list[tuple[float, int]] = []
    for number in range(count):
        now = number * 20.0 / count
        while asks and asks[0][0] <= now:
            when, which = heapq.heappop(asks)
            model.advance(when)
            model.use(name(which), when)
        model.advance(now)
        uses = number % len(habits)
        model.track(name(number), ReuseClass(Origin.DECODE, uses), now)
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
            assert model.earnings(ReuseClass(Origin.DECODE, 0), age) == pytest.approx(truth, rel=0.3), age


def test_an_entry_about_to_be_used_is_worth_most() -> None:
    """Uses fall between half an arena and one: the longer an entry has waited the better, until they are over."""
    model = learn({0: Habit(0.8, 0.5, 1.0)}, 4000)
    earned = [model.earnings(ReuseClass(Origin.DECODE, 0), age) for age in MIDDLES]
    top = age_bin(0.75)
    assert earned[: top + 1] == sorted(earned[: top + 1]) and earned[top] > 2 * earned[0]
    assert earned[top + 1] < 0.2 * earned[top]


def test_uses_so_far_tell_entries_apart() -> None:
    model = learn({0: Habit(0.1, 0.0, 1.0), 1: Habit(0.8, 0.0, 1.0)}, 6000)
    once, never = (model.earnings(ReuseClass(Origin.DECODE, uses), 0.0) for uses in (1, 0))
    assert once / never > 4


def test_tools_are_taken_to_answer_at_once() -> None:
    """Before anything is seen: a conversation that waits for one is worth more than one that waits for a person, until
    it has waited for long."""
    model = HazardModel(PRIORS)
    tool, person = ReuseClass(EndKind.TOOL_CALL, 3), ReuseClass(Origin.DECODE, 3)
    assert model.earnings(tool, 0.0) > 5 * model.earnings(person, 0.0)
    assert model.earnings(tool, 5.0) < model.earnings(person, 5.0)


def test_kinds_are_learnt_apart() -> None:
    model = learn({0: Habit(0.9, 0.0, 0.25)}, 3000)
    fresh = HazardModel(PRIORS)
    learnt = ReuseClass(Origin.DECODE)
    assert model.earnings(learnt, 0.0) > 2 * fresh.earnings(learnt, 0.0)
    for kind in set(PRIORS) - {Origin.DECODE}:
        other = ReuseClass(kind, 1)
        assert [model.earnings(other, age) for age in MIDDLES] == [fresh.earnings(other, age) for age in MIDDLES]


def test_entries_that_gave_way_are_learnt_from() -> None:
    """Nothing is held for longer than 0.2 arenas, and what comes back later is seen all the same."""
    model = HazardModel(PRIORS)
    for number in range(400):
        now = number / 20
        model.track(name(number), ReuseClass(Origin.DECODE), now)
        if number >= 12:
            model.advance(now)
            assert model.waits_for(name(number - 12))
            assert model.use(name(number - 12), now) == ReuseClass(Origin.DECODE, 0)
    earned = [model.earnings(ReuseClass(Origin.DECODE, 0), age) for age in MIDDLES]
    assert int(np.argmax(earned)) == age_bin(0.6)


def test_before_anything_is_seen_an_entry_of_some_age_is_worth_as_much_as_a_new_one() -> None:
    """Up to an arena; then less and less. Of keys and values alone the newer ones are worth more from the start."""
    model = HazardModel(PRIORS)
    earned = [model.earnings(ReuseClass(Origin.DECODE, 0), age) for age in MIDDLES]
    below = age_bin(1.0)
    assert max(earned[:below]) < 1.4 * min(earned[:below])
    assert earned[below:] == sorted(earned[below:], reverse=True) and earned[below] < 0.5 * earned[below - 1]
    blocks = [model.earnings(ReuseClass(Origin.BLOCK, 0), age) for age in MIDDLES]
    assert blocks[1:] == sorted(blocks[1:], reverse=True) and blocks[0] > 0.95 * blocks[1]


def test_what_is_told_of_a_return() -> None:
    model = HazardModel(PRIORS)
    model.track(name(1), ReuseClass(Origin.DECODE, 3), 0.0)
    model.track(name(2), ReuseClass(Origin.JUNCTION, 3), 0.0)
    assert model.use(name(1), 0.5) == ReuseClass(Origin.DECODE, 3)
    assert model.use(name(1), 0.5) is None  # once
    assert model.use(name(2), 0.5) == ReuseClass(Origin.JUNCTION, 3)
    assert not model.waits_for(name(1)) and not model.waits_for(name(2))


def test_a_bounded_number_is_waited_for() -> None:
    model = HazardModel(PRIORS)
    for number in range(NUM_TRACKED + 10):
        model.track(name(number), ReuseClass(Origin.INTERVAL), number / NUM_TRACKED)
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
