"""The states that decoding rows keep at their newest block boundaries do not crowd a tier's copies."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import Origin
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens

ROWS = 3


def num_decoded(store: PrefixStore) -> int:
    """Return how many states of decoding rows a store has."""
    found = (node.checkpoint for node in store.tree.nodes())
    return sum(each is not None and each.origin is Origin.DECODE for each in found)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("layout", HYBRIDS)
@pytest.mark.parametrize("length", [10, 65])
def test_a_tier_that_is_writing_takes_none_near_another_state(layout: str, streams: bool, length: int) -> None:
    """After a prompt of 65 tokens there is a state at 64; after one of 10 tokens there is none."""
    chosen = LAYOUTS[layout]
    harness = Harness(chosen, num_pages=chosen.num_pages_for(2400, 12), num_host_pages=400, host_streams=streams)
    for number in range(ROWS):
        harness.add(str(number), tokens(number, length), 260)
    store, tier = harness.sched.cache.store, harness.sched.cache.tiers.host
    assert tier is not None
    for _ in range(100):
        harness.step()
    assert num_decoded(store) == ROWS
    while store.evict_least():
        pass
    is_spared = streams and length == 65  # without streams each copy ends at once
    assert num_decoded(tier.store) <= 1 if is_spared else num_decoded(tier.store) == ROWS
    harness.run()
    for number in range(ROWS):
        harness.check_output(str(number))
    stored = num_decoded(tier.store)
    while store.evict_least():
        pass
    assert num_decoded(tier.store) == stored + ROWS, "they are the ends of answers now"


def test_the_next_turn_computes_little_after_a_long_answer() -> None:
    """Each state of the row is evicted while the row goes on, and the answer ends between two boundaries."""
    chosen = LAYOUTS["several blocks a page"]
    harness = Harness(chosen, num_pages=chosen.num_pages_for(2400, 8), num_host_pages=400, host_streams=True)
    prompt = tokens(0, 140)
    harness.add("writes", prompt, 1000)
    store = harness.sched.cache.store
    for number in range(1000):
        harness.step()
        if number % 64 == 60:
            while store.evict_least():
                pass
    harness.run()
    answer = np.asarray(harness.output("writes"), np.int32)
    harness.ask("next", np.concatenate([prompt, answer, tokens(5, 70)]), 2)
    assert harness.computed["next"] < 70 + 64 + 64
