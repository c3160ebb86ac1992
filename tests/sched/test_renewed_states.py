"""The state that a decoding row keeps at its newest block boundary goes to no tier while the row renews it."""

from __future__ import annotations

import pytest

from forkpoint.cache.tree import Origin
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("layout", HYBRIDS)
def test_a_tier_takes_it_only_after_the_request(layout: str, streams: bool) -> None:
    chosen = LAYOUTS[layout]
    harness = Harness(chosen, num_pages=chosen.num_pages_for(2400, 8), num_host_pages=400, host_streams=streams)
    harness.add("writes", tokens(0, 10), 260)
    store, tier = harness.sched.cache.store, harness.sched.cache.tiers.host
    assert tier is not None
    depths = list[int]()
    for steps in (100, 90):
        for _ in range(steps):
            harness.step()
        newest = max(store.by_worth(), key=lambda entry: entry.num_tokens)  # type: ignore[union-attr]
        assert newest.origin is Origin.DECODE  # type: ignore[union-attr]
        tier.store_ahead(store)
        while store.evict_least():
            pass
        depths.append(tier.store.tree.num_nodes)
    assert depths == [0, 0], "the row goes on, and nothing else was evicted"
    harness.run()
    harness.check_output("writes")
    while store.evict_least():
        pass
    assert tier.store.num_checkpoints, "it is the end of the answer now"
