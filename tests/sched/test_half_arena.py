"""An arena of half the peak bytes: nobody fails, nobody waits forever, outputs are the same, and work is not redone
so often that throughput halves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.cache.layout import CacheLayout
from forkpoint.sched.plan import IntArray
from tests.sched.harness import LAYOUTS, Harness, tokens

BUDGET = 512
KINDS = {  # kind -> (prompt tokens, output tokens), each a range
    "long": ((500, 3000), (1, 60)),
    "short": ((1, 100), (1, 60)),
    "decode": ((1, 200), (100, 500)),
    "shared": ((300, 1500), (10, 100)),
}
COMMON = tokens(5, 1500)


@dataclass(frozen=True)
class Run:
    num_tokens: int  # entered the model
    num_steps: int


def draw_mix(seed: int, kinds: list[str]) -> list[tuple[IntArray, int]]:
    """8 to 24 prompts with their output lengths; the first half of a "shared" prompt is everyone's."""
    rng = np.random.default_rng(seed)
    mix = []
    for _ in range(int(rng.integers(8, 25))):
        kind = kinds[rng.integers(len(kinds))]
        (low, high), (fewest, most) = KINDS[kind]
        prompt = rng.integers(0, 5000, rng.integers(low, high + 1), dtype=np.int32)
        if kind == "shared":
            prompt[: len(prompt) // 2] = COMMON[: len(prompt) // 2]
        mix.append((prompt, int(rng.integers(fewest, most + 1))))
    return mix


def peak_pages(layout: CacheLayout, mix: list[tuple[IntArray, int]]) -> int:
    """All requests at their final length at once, each with its running slot."""
    blocks = sum(layout.num_blocks_for(len(prompt) + outputs) for prompt, outputs in mix)
    return -(-(blocks * layout.block_bytes + len(mix) * layout.slot_bytes) // layout.page_bytes)


def half_pages(layout: CacheLayout, mix: list[tuple[IntArray, int]]) -> int:
    """Half of that, and at least one full request and two slots more."""
    largest = max(layout.num_pages_for(len(prompt) + outputs, 3) for prompt, outputs in mix)
    return max(-(-peak_pages(layout, mix) // 2), largest)


def serve(layout: CacheLayout, pages: int, mix: list[tuple[IntArray, int]], check: bool, async_scheduling: bool) -> Run:
    harness = Harness(layout=layout, num_pages=pages + 1, budget=BUDGET, check=check, async_scheduling=async_scheduling)
    for index, (prompt, outputs) in enumerate(mix):
        harness.add(f"r{index}", prompt, outputs)
    harness.run()
    for index in range(len(mix)):
        harness.check_output(f"r{index}")
    return Run(harness.runner.num_tokens, harness.runner.num_steps)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@settings(max_examples=2, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True),
    async_scheduling=st.booleans(),
)
def test_half_the_peak_bytes(name: str, seed: int, kinds: list[str], async_scheduling: bool) -> None:
    layout, mix = LAYOUTS[name], draw_mix(seed, kinds)
    ample = serve(layout, 4 * peak_pages(layout, mix) + 64, mix, check=False, async_scheduling=async_scheduling)
    half = serve(layout, half_pages(layout, mix), mix, check=True, async_scheduling=async_scheduling)
    assert ample.num_tokens >= 0.5 * half.num_tokens, "more than every other token was computed twice"
    # list scheduling on half the room: twice the steps, and the request that happens to start last
    last = max(outputs + -(-len(prompt) // BUDGET) for prompt, outputs in mix)
    assert half.num_steps <= 2 * ample.num_steps + last


def test_half_of_the_throughput_over_many_mixes() -> None:
    tokens_ratio, steps_ratio = [], []
    layout = LAYOUTS["several blocks a page"]
    for seed in range(4):
        mix = draw_mix(seed, sorted(KINDS))
        ample = serve(layout, 4 * peak_pages(layout, mix) + 64, mix, check=False, async_scheduling=False)
        half = serve(layout, half_pages(layout, mix), mix, check=False, async_scheduling=False)
        tokens_ratio.append(ample.num_tokens / half.num_tokens)
        steps_ratio.append(ample.num_steps / half.num_steps)
    assert np.mean(tokens_ratio) >= 0.8 and min(tokens_ratio) >= 0.6, tokens_ratio
    assert np.mean(steps_ratio) >= 0.7 and min(steps_ratio) >= 0.5, steps_ratio
