"""Loads are weighed against computing by what both were seen to take."""

from __future__ import annotations

import pytest

from forkpoint.cache.eviction import RecomputeCost
from forkpoint.cache.load_choice import PATIENCE, SLACK_S, TRY_AGAIN_S, LoadChoice, LoadProgress

MIB = 1 << 20
WINDOW = 128 * MIB  # which is read at a time


class Timed:
    """A choice whose tokens each cost 1, under a clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.choice = LoadChoice(RecomputeCost(), lambda: self.now)

    def pays(self, num_bytes: int = 512 * MIB, num_tokens: int = 16384, *, is_busy: bool = False) -> bool:
        return self.choice.pays(num_bytes, 0, num_tokens, is_busy=is_busy)


def test_a_load_pays_until_both_were_timed() -> None:
    timed = Timed()
    assert timed.pays()
    timed.choice.note_load(WINDOW, 10.0)
    assert timed.pays()


@pytest.mark.parametrize(("seconds", "idle", "busy"), [(0.1, True, True), (0.6, False, True), (2.5, False, False)])
def test_the_faster_way_is_chosen(seconds: float, idle: bool, busy: bool) -> None:
    timed = Timed()
    timed.choice.note_step(8192, 0.0, 0.25)  # 16384 tokens take 0.5 s
    for delay in (5.0, 1.0, 3.0):  # of reports that had to wait for long steps
        timed.choice.note_load(WINDOW, delay * seconds / 4)  # four windows take `seconds` at best
    timed.choice.note_load(64, 1e-9)  # too few bytes to say anything
    assert timed.pays() == idle
    assert timed.pays(is_busy=True) == busy


def test_a_late_tier_is_tried_again_later() -> None:
    timed = Timed()
    assert not timed.choice.is_late(WINDOW, SLACK_S) and timed.pays()
    assert timed.choice.is_late(WINDOW, 2 * SLACK_S) and not timed.pays()
    timed.now += TRY_AGAIN_S - 1
    assert not timed.pays()
    timed.now += 2
    assert timed.pays()


def test_a_slow_rate_is_forgotten() -> None:
    timed = Timed()
    timed.choice.note_step(8192, 0.0, 0.25)
    timed.choice.note_load(WINDOW, 10.0)
    assert not timed.pays()
    timed.now += TRY_AGAIN_S + 1
    assert timed.pays()


def test_old_steps_count_for_less() -> None:
    timed = Timed()
    for _ in range(100):
        timed.choice.note_step(1024, 0.0, 1.0)
    timed.choice.note_load(WINDOW, 0.25)  # 1 s for all of it
    assert timed.pays()
    for _ in range(40):
        timed.choice.note_step(8192, 0.0, 0.1)
    assert not timed.pays()


def test_a_load_that_turns_out_slower_than_computing_is_given_up() -> None:
    timed = Timed()
    patience = PATIENCE * 0.5  # 16384 tokens take 0.5 s

    def goes_on(elapsed_s: float, arrived: int, awaited: int = 4 * MIB, rest: int = 512 * MIB) -> bool:
        return timed.choice.goes_on(LoadProgress(elapsed_s, arrived, awaited, rest), 0, 16384)

    assert goes_on(100.0, 0), "nobody knows how fast computing is"
    timed.choice.note_step(8192, 0.0, 0.25)
    assert goes_on(patience / 2, 0), "it is too early to say"
    assert goes_on(1.1 * patience, 64 * MIB), "as fast as this it takes a tenth of a second"
    assert goes_on(10.0, 0, rest=0), "all of it may arrive now"
    assert goes_on(10.0, 4 * MIB, awaited=0), "it came at once, as far as anybody knows"
    assert timed.pays()
    assert not goes_on(1.1 * patience, 8 * MIB, awaited=64 * MIB, rest=448 * MIB), "it takes 0.7 s"
    timed.now += TRY_AGAIN_S + 1
    assert timed.pays()
    assert not goes_on(1.1 * patience, 0)
    assert not timed.pays(), "its rate is known now"
    timed.now += TRY_AGAIN_S + 1
    assert timed.pays()
