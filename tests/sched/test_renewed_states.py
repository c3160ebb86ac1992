"""The states that decoding rows keep at their newest block boundaries do not crowd a tier's copies."""

from __future__ import annotations

import pytest

from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens

ROWS = 3


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("layout", HYBRIDS)
def test_a_tier_that_is_writing_takes_none_of_them(layout: str, streams: bool) -> None:
    chosen = LAYOUTS[layout]
    harness = Harness(chosen, num_pages=chosen.num_pages_for(2400, 12), num_host_pages=400, host_streams=streams)
    for number in range(ROWS):
        harness.add(str(number), tokens(number, 10), 260)
    store, tier = harness.sched.cache.store, harness.sched.cache.tiers.host
    assert tier is not None
    for _ in range(100):
        harness.step()
    assert store.num_checkpoints == ROWS
    tier.store_ahead(store)
    while store.evict_least():
        pass
    assert tier.store.num_checkpoints == (1 if streams else ROWS), "copies to streams end later"
    harness.run()
    for number in range(ROWS):
        harness.check_output(str(number))
    stored = tier.store.num_checkpoints
    while store.evict_least():
        pass
    assert tier.store.num_checkpoints == stored + ROWS, "they are the ends of answers now"
