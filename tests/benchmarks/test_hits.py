"""The hit table: the page and the README are what the engine does now and what vLLM's own scheduler did."""

from __future__ import annotations

import pytest

from benchmarks.hits import forkpoint_engine
from benchmarks.hits.__main__ import PAGE, README, README_SETTINGS, page, readme_with, table
from benchmarks.hits.cases import cases
from benchmarks.hits.results import VllmResults, read


@pytest.fixture(scope="module")
def ours() -> dict[str, int]:
    return {case.key: forkpoint_engine.play(case) for case in cases()}


@pytest.fixture(scope="module")
def results() -> VllmResults:
    return read()


def test_readme_and_page_are_current(ours: dict[str, int], results: VllmResults) -> None:
    text = README.read_text()
    assert readme_with(text, table(results, ours, README_SETTINGS)) == text
    assert page(results, ours) == PAGE.read_text()


def test_what_the_prose_says_of_vllm(ours: dict[str, int], results: VllmResults) -> None:
    """Sentences whose numbers are not generated."""
    settings = {name: {key: case.cached[-1] for key, case in s.cases.items()} for name, s in results.settings.items()}
    assert settings["finest"] == settings["unit_1"], "the flag for shared prefixes changes no row"
    retained = settings["finest_retained"]
    assert (retained["turn_2"], retained["preempted"], retained["fork"]) == (5440, 5440, 7616)
    assert max(settings["finest"][key] - ours[key] for key in ours) == 31
    assert len(results.settings["finest"].cases["preempted"].chunks) == 3
    assert {s.block_tokens for name, s in results.settings.items() if name != "triton"} == {1088}


def test_a_readme_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 tables"):
        readme_with("no table", [])
