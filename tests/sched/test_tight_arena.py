"""A request that just fits runs to its end, however little is left for checkpoints."""

from __future__ import annotations

import pytest

from tests.cache.shapes import layout_of, state
from tests.sched.harness import HYBRIDS, KV, LAYOUTS, Harness, tokens

EVEN = state(None, (4, 32, 32))
TIGHT = {"a block and a slot are a page": layout_of([KV, EVEN]), **{name: LAYOUTS[name] for name in HYBRIDS}}


@pytest.mark.parametrize(
    ("deterministic", "async_scheduling"), [(False, True), (True, False)], ids=["default-async", "deterministic-sync"]
)
@pytest.mark.parametrize("name", TIGHT)
def test_a_request_that_fills_the_arena_crosses_boundaries(
    name: str, deterministic: bool, async_scheduling: bool
) -> None:
    layout = TIGHT[name]
    for size in (1, 60, 64, 127, 500):
        for outputs in (70, 200):
            harness = Harness(
                layout=layout,
                num_pages=layout.num_pages_for(size + outputs, 1) + 1,
                async_scheduling=async_scheduling,
                deterministic=deterministic,
            )
            harness.ask("r", tokens(size, size), outputs)
