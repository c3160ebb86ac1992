"""The step that first finds no room costs about what those after it do."""

from __future__ import annotations

import pytest

from forkpoint.cache.learnt import LearntPolicy
from tests.cache.shapes import REAL_LAYOUTS
from tests.sched.harness import Harness, tokens

LENGTH, NUM_PAGES = 4096, 1000  # of a page each two blocks or eleven states: some 1,700 entries when it is full


def test_the_first_who_finds_no_room_does_not_wait_for_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each state of a short convolution is as small as a few tokens' keys, so there is one for every block; they were
    all filed anew when the first had to go."""
    calls, most, evicted = 0, 0, 0
    key = LearntPolicy.key

    def counted(*args: object) -> float:
        nonlocal calls
        calls += 1
        return key(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(LearntPolicy, "key", counted)
    harness = Harness(layout=REAL_LAYOUTS["LFM2-8B-A1B"], num_pages=NUM_PAGES, check=False)
    schedule = harness.sched.schedule

    def watched() -> object:
        nonlocal most
        before = calls
        plan = schedule()
        most = max(most, calls - before)
        return plan

    monkeypatch.setattr(harness.sched, "schedule", watched)
    for i in range(2 * NUM_PAGES * 2 * 64 // LENGTH):
        harness.ask(f"prompt {i}", tokens(i, LENGTH), 1)
        evicted = sum(harness.sched.cache.store.stats().checkpoints_evicted.values())
    assert evicted > 100 and most < 600
