"""Cached tokens, row by row, as users of vLLM would compare them. No hints unless said."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.cache.layout import CacheLayout
from forkpoint.outputs import MissReason
from tests.cache.shapes import REAL_LAYOUTS
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens


@pytest.fixture(params=HYBRIDS)
def harness(request: pytest.FixtureRequest) -> Harness:
    return Harness(layout=LAYOUTS[request.param], num_pages=30_000, check=False)


def tight(name: str, row_tokens: int) -> Harness:
    """An arena of twice the row's keys and values plus 8 slots, filled by unrelated prompts before."""
    layout = LAYOUTS[name]
    pages = layout.num_pages_for(2 * row_tokens, 0) + -(-8 // layout.slots_per_page) + 1
    harness = Harness(layout=layout, num_pages=pages, check=False)
    for i in range(6):
        harness.ask(f"unrelated {i}", tokens(1000 + i, row_tokens // 2 + 77))
    return harness


def turn(harness: Harness, name: str, prompt: np.ndarray) -> np.ndarray:
    return np.concatenate([prompt, np.asarray(harness.output(name), np.int32)])


def again(harness: Harness, length: int, outputs: int) -> int:
    prompt = tokens(1, length)
    harness.ask("first", prompt, outputs)
    return harness.ask("again", prompt).cache.num_cached_tokens


def test_resend(harness: Harness) -> None:
    assert again(harness, 5000, 600) >= 4992


def test_resend_multiple_of_64(harness: Harness) -> None:
    assert again(harness, 4992, 600) >= 4928


def test_short(harness: Harness) -> None:
    assert again(harness, 900, 1) >= 896


def second_turn(harness: Harness) -> int:
    prompt = tokens(1, 5000)
    harness.ask("turn 1", prompt, 600)
    longer = np.concatenate([turn(harness, "turn 1", prompt), tokens(2, 500)])
    return harness.ask("turn 2", longer).cache.num_cached_tokens


def test_turn_2(harness: Harness) -> None:
    assert second_turn(harness) >= 5568


def test_extension(harness: Harness) -> None:
    prompt = tokens(1, 20_000)
    harness.ask("first", prompt)
    assert harness.ask("more", np.concatenate([prompt, tokens(2, 10)])).cache.num_cached_tokens >= 19_968


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_hold_in_a_full_arena(name: str) -> None:
    assert again(tight(name, 5600), 5000, 600) >= 4992
    assert again(tight(name, 5592), 4992, 600) >= 4928
    assert again(tight(name, 900), 900, 1) >= 896
    assert second_turn(tight(name, 6100)) >= 5568
    harness = tight(name, 20_010)
    test_extension(harness)


def shared(seed: int) -> np.ndarray:
    return np.concatenate([tokens(1, 3000), tokens(seed, 2000)])


def test_shared_prefix(harness: Harness) -> None:
    harness.ask("first", shared(10))
    second = harness.ask("second", shared(11))
    everywhere = harness.layout.capture_interval(512) == 64
    assert second.cache.num_cached_tokens >= (2944 if everywhere else 2560)
    assert second.cache.kv_num_tokens == 2944
    assert second.cache.miss is (MissReason.COLD if everywhere else MissReason.NO_CHECKPOINT)
    assert harness.ask("third", shared(12)).cache.num_cached_tokens >= 2944


def test_shared_prefix_declared(harness: Harness) -> None:
    harness.ask("first", shared(10), breakpoints=(3000,))
    assert harness.ask("second", shared(11)).cache.num_cached_tokens >= 2944


@pytest.mark.parametrize("budget", [2048, 8192])
def test_shared_prefix_in_the_queue(budget: int) -> None:
    harness = Harness(budget=budget)
    first, second = harness.add("first", shared(10)), harness.add("second", shared(11))
    harness.run()
    assert first.cache.num_cached_tokens == 0
    assert second.cache.num_cached_tokens >= 2944
    harness.check_output("first")
    harness.check_output("second")
    assert harness.computed["first"] + harness.computed["second"] == 10_000 - second.cache.num_cached_tokens


def test_fork(harness: Harness) -> None:
    prompt = tokens(1, 20_000)
    harness.ask("trunk", prompt)
    fork = harness.ask("fork", np.concatenate([prompt[:9000], tokens(2, 500)]))
    assert fork.cache.num_cached_tokens >= 8704
    again = harness.ask("second fork", np.concatenate([prompt[:9000], tokens(3, 500)]))
    assert again.cache.num_cached_tokens >= 8960


def preempted(harness: Harness) -> int:
    request = harness.add("long", tokens(1, 5000), 700, priority=1)
    while len(request.output_token_ids) < 600:
        harness.step()
    entry = harness.sched._requests["long"]
    harness.sched._departures.preempt(entry)
    harness.run()
    harness.check_output("long")
    assert request.num_preemptions == 1 and request.resume_cache is not None
    return request.resume_cache.num_cached_tokens


def test_preempted(harness: Harness) -> None:
    assert preempted(harness) >= 5568


@pytest.mark.parametrize("name", HYBRIDS)
def test_preempted_in_a_full_arena(name: str) -> None:
    assert preempted(tight(name, 5700)) >= 5568


def test_deterministic_turn_2_reuses_what_prefill_made() -> None:
    assert second_turn(Harness(num_pages=30_000, deterministic=True)) == 4992


def rows(layout: CacheLayout) -> dict[str, int]:
    """Cached tokens of the table's cases, each in ample room of its own."""

    def fresh() -> Harness:
        return Harness(layout=layout, num_pages=layout.num_pages_for(50_000, 700), check=False)

    found = {"resend": again(fresh(), 5000, 600), "short": again(fresh(), 900, 1), "turn 2": second_turn(fresh())}
    harness = fresh()
    for name, seed in (("first", 10), ("second", 11), ("third", 12)):
        found[name] = harness.ask(name, shared(seed)).cache.num_cached_tokens
    prompt = tokens(1, 20_000)
    harness = fresh()
    harness.ask("trunk", prompt)
    found["fork"] = harness.ask("fork", np.concatenate([prompt[:9000], tokens(2, 500)])).cache.num_cached_tokens
    return found


ROWS = {"resend": 4992, "short": 896, "turn 2": 5568, "first": 0, "second": 2560, "third": 2944, "fork": 8704}
SMALL = {**ROWS, "second": 2944, "fork": 8960}  # whose slots are as small as a few tokens' keys


# Pages of one slot or of 7, 49 or 200 blocks; without keys; of two slots; of ten slots; and with windows.
SHAPES = ("OLMo-Hybrid-7B", "Qwen3-Next-80B-A3B", "Ling-2.6-flash", "Mamba2-2.7B", "Zamba2-7B")
SHAPES += ("LFM2-1.2B", "LFM2-8B-A1B", "LFM3-1.7B", "Lara-4-Mini")


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_the_same_for_every_layout(name: str) -> None:
    assert rows(REAL_LAYOUTS[name]) == (SMALL if name.startswith("LFM2") else ROWS)
