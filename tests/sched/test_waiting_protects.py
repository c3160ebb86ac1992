"""What a waiting request is going to resume from does not give way to those that run before it."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.config import CacheConfig
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens

LENGTH = 3000
PROMPTS = {"one": tokens(1, LENGTH), "other": tokens(2, LENGTH)}


def filled(layout_name: str, policy: str) -> Harness:
    """One row, and an arena that two prompts fill, of which one has to give way for a third to run."""
    layout = LAYOUTS[layout_name]
    num_pages = 1 + layout.num_pages_for(2 * LENGTH, 4)
    cache = CacheConfig(eviction_policy=policy, capture_policy="prompt-end")
    harness = Harness(layout=layout, num_pages=num_pages, max_num_seqs=1, cache=cache)
    for name, prompt in PROMPTS.items():
        harness.ask(name, prompt)
    return harness


def found_after_a_third(layout_name: str, policy: str, waiting: str | None) -> dict[str, int]:
    """What each prompt finds once a third has run, behind which a request for `waiting` waited."""
    harness = filled(layout_name, policy)
    harness.add("third", tokens(3, LENGTH))
    if waiting is not None:
        harness.add("waiting", np.concatenate([PROMPTS[waiting], tokens(4, 10)]))
        harness.run()
        harness.check_output("waiting")
        return {waiting: harness.requests["waiting"].cache.num_cached_tokens}
    harness.run()
    cache = harness.sched.cache
    return {
        name: cache.lookup(cache.new_lease(name, "", prompt), LENGTH).num_tokens for name, prompt in PROMPTS.items()
    }


@pytest.mark.parametrize("policy", ["cost", "lru"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_what_waiting_requests_resume_from_stays(name: str, policy: str) -> None:
    end = LENGTH // 64 * 64
    lost = [found for found in found_after_a_third(name, policy, None).values() if found < end - 128]
    assert lost, "there was room for all, so that this shows nothing"
    for waiting in PROMPTS:
        assert found_after_a_third(name, policy, waiting)[waiting] == end


@pytest.mark.parametrize("name", HYBRIDS)
def test_nothing_stays_expected(name: str) -> None:
    """Requests that ran, and requests that left the queue, expect nothing any more. The first waits for no other."""
    harness = filled(name, "cost")
    for index in range(4):
        harness.add(f"again {index}", np.concatenate([PROMPTS["one"], tokens(index, 10)]))
    [expected] = {c for c in harness.checkpoints(PROMPTS["one"]).values() if c.num_expected}
    assert expected.num_expected == 3
    harness.sched.abort("again 1")
    assert expected.num_expected == 2
    harness.run()
    assert expected.num_expected == 0
