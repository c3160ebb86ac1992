"""Tests which positions of a chunk are candidates for a checkpoint, and why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.cache.capture import Candidate, CaptureContext, DefaultCapture
from forkpoint.cache.policies import CAPTURE
from forkpoint.cache.policy_answers import checked_candidates
from forkpoint.cache.tree import Origin


def found(interval: int = 0, **changes: Any) -> dict[int, Origin]:
    context = CaptureContext(**{"start": 0, "end": 2048, "prompt_end": 5000, "interval": interval, **changes})
    candidates = checked_candidates(DefaultCapture(), context)
    positions = [candidate.num_tokens for candidate in candidates]
    assert len(set(positions)) == len(positions)
    return {candidate.num_tokens: candidate.origin for candidate in candidates}


@pytest.mark.parametrize(
    ("prompt_end", "positions"), [(100, {64}), (128, {64, 128}), (129, {128}), (64, {64}), (63, set()), (191, {128})]
)
def test_the_last_boundary_of_the_prompt(prompt_end: int, positions: set[int]) -> None:
    """At `floor((P - 1) / 64) * 64`, and at P itself where 64 divides it."""
    chosen = found(end=prompt_end, prompt_end=prompt_end)
    assert {position for position, origin in chosen.items() if origin is Origin.PROMPT_END} == positions


@pytest.mark.parametrize(
    ("prompt_end", "positions"), [(128, set()), (129, {64}), (192, {64}), (193, {128}), (300, {192})]
)
def test_one_boundary_before_the_last_one(prompt_end: int, positions: set[int]) -> None:
    chosen = found(end=prompt_end, prompt_end=prompt_end)
    assert {position for position, origin in chosen.items() if origin is Origin.NEAR_END} == positions
    declared = found(end=prompt_end, prompt_end=prompt_end, breakpoints=tuple(positions))
    assert Origin.NEAR_END not in declared.values()


def test_only_positions_inside_the_chunk() -> None:
    chosen = found(512, start=1024, end=2048, junctions=frozenset({1024, 1088, 2048, 2112}), breakpoints=(900, 1300))
    assert chosen == {
        1088: Origin.JUNCTION,
        2048: Origin.JUNCTION,
        1280: Origin.BREAKPOINT,
        1536: Origin.INTERVAL,
    }


def test_the_best_reason_wins() -> None:
    everything = {"junctions": frozenset({512}), "breakpoints": (512, 1024), "prompt_end": 2000, "end": 2000}
    chosen = found(512, **everything)
    assert chosen[512] is Origin.JUNCTION and chosen[1024] is Origin.BREAKPOINT and chosen[1536] is Origin.INTERVAL
    assert chosen[1984] is Origin.PROMPT_END


def test_no_interval() -> None:
    assert found(0) == {}


@given(
    start=st.integers(0, 40).map(lambda n: 64 * n),
    length=st.integers(1, 3000),
    more=st.integers(0, 3000),
    interval=st.sampled_from([0, 64, 512]),
    breakpoints=st.lists(st.integers(0, 6000), max_size=4),
    junctions=st.frozensets(st.integers(0, 6000), max_size=4),
)
def test_candidates_are_at_block_boundaries_and_inside(
    start: int, length: int, more: int, interval: int, breakpoints: list[int], junctions: frozenset[int]
) -> None:
    context = CaptureContext(
        start, start + length, start + length + more, tuple(breakpoints), junctions, interval=interval
    )
    for candidate in checked_candidates(DefaultCapture(), context):
        assert isinstance(candidate, Candidate)
        assert candidate.num_tokens % 64 == 0 and start < candidate.num_tokens <= start + length


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("prompt-end", {1984}),
        ("default", {1984, 1920, 576, 640, 704, 512, 1024, 1536}),
        ("dense", set(range(64, 2001, 64))),
    ],
)
def test_policies_by_name(name: str, positions: set[int]) -> None:
    context = CaptureContext(0, 2000, 2000, (576,), frozenset({640}), frozenset({704}), interval=512)
    candidates = checked_candidates(CAPTURE.find(name)(), context)
    assert {candidate.num_tokens for candidate in candidates} == positions
    periodic = [c for c in candidates if c.origin is Origin.INTERVAL]
    assert all(c.may_evict == (name != "default") for c in periodic)


def test_fallbacks_inside_prompts_that_fill_much_of_the_arena() -> None:
    """At every multiple of the step, but for those that the prompt's end makes superfluous."""

    def fallbacks(prompt_end: int, step: int) -> set[int]:
        chosen = found(end=prompt_end, prompt_end=prompt_end, fallback_step=step)
        return {position for position, origin in chosen.items() if origin is Origin.FALLBACK}

    assert fallbacks(20_000, 6016) == {6016, 12_032}  # 18,048 is too near the end
    assert fallbacks(22_000, 6016) == {6016, 12_032, 18_048}
    assert fallbacks(5000, 6016) == set() and fallbacks(20_000, 0) == set()


def test_no_fallback_beyond_what_survived_the_last_time() -> None:
    """There, and at the multiples of the step before it; if less than one step survived it says nothing."""

    def fallbacks(survived: int) -> set[int]:
        chosen = found(end=30_000, prompt_end=30_000, fallback_step=6400, num_survived_tokens=survived)
        return {position for position, origin in chosen.items() if origin is Origin.FALLBACK}

    assert fallbacks(0) == fallbacks(5000) == {6400, 12_800, 19_200, 25_600}
    assert fallbacks(14_400) == {6400, 12_800, 14_400}
    assert fallbacks(28_992) == {6400, 12_800, 19_200, 25_600, 28_992}
