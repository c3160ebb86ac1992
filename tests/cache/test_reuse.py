"""The running median of reuse distances."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.cache.reuse import LONGEST, SHORTEST, ReuseDistance


@pytest.mark.parametrize("median", [0.2, 0.7, 1.5])
def test_it_finds_the_median(median: float) -> None:
    distance, rng = ReuseDistance(), np.random.default_rng(0)
    for value in median * 2 ** rng.normal(0, 1, 600):
        distance.observe(float(value))
    assert distance.median == pytest.approx(median, rel=0.35)


def test_a_few_observations_move_it_far() -> None:
    distance = ReuseDistance()
    for _ in range(4):
        distance.observe(1.2)
    assert 0.7 < distance.median < 1.7


def test_it_is_told_when_it_changes_and_stays_in_bounds() -> None:
    distance, before = ReuseDistance(), 0.25
    for value in [100.0] * 50 + [0.0] * 200:
        changed = distance.observe(value)
        assert changed == (distance.median != before)
        before = distance.median
        assert SHORTEST <= distance.median <= LONGEST
    assert distance.median < 1.2 * SHORTEST
