from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest

from forkpoint.cache.layer_spec import KVSpec
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import EngineConfig
from forkpoint.obs.logs import (
    LOGGER,
    cache_plan_lines,
    counted,
    operator_lines,
    operators_line,
    set_up_logging,
    wants_color,
)
from tests.cache.shapes import layout_of, state

KV = KVSpec.of(2, 16, 16, "float32")
STATE = state((3, 64), (4, 16, 16), "float32")
HYBRID, ATTENTION = layout_of([KV, STATE]), layout_of([KV])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colour_follows_the_environment(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.setenv(name, environment.get(name, ""))
    assert wants_color(io.StringIO()) is expected


def test_the_level_decides_and_a_second_call_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    first, second = io.StringIO(), io.StringIO()
    for level, stream in (("info", first), ("warning", second)):
        monkeypatch.setattr(sys, "stderr", stream)
        set_up_logging(level)
    LOGGER.info("quiet")
    LOGGER.warning("loud")
    assert first.getvalue() == ""
    assert second.getvalue().startswith("\033[33mWARNING\033[0m ") and second.getvalue().endswith("loud\n")


def plan(layout: CacheLayout, **options: object) -> str:
    config = EngineConfig.from_flat(**options)
    return "\n".join(cache_plan_lines(layout, 100, config, 4096))


def test_the_cache_plan_names_sizes_and_policy() -> None:
    text = plan(HYBRID, eviction_policy="lru", checkpoint_interval=1024)
    for part in (
        f"100 pages of {HYBRID.page_bytes:,} bytes",
        f"{HYBRID.blocks_per_page} blocks or {HYBRID.slots_per_page} slots",
        f"block: 64 tokens, {HYBRID.block_bytes:,} bytes; {99 * HYBRID.blocks_per_page:,} at most",
        f"{HYBRID.slot_bytes:,} bytes; {99 * HYBRID.slots_per_page:,} at most",
        "smallest reusable prefix 64 tokens",
        "every 1024 tokens",
        "eviction by lru",
    ):
        assert part in text


def test_the_cache_plan_names_a_capture_policy_instead_of_what_it_ignores() -> None:
    text = plan(HYBRID, capture_policy="prompt-end")
    assert "64 tokens, checkpoints by prompt-end, eviction by cost" in text and "periodic" not in text
    assert "checkpoints by" not in plan(ATTENTION, capture_policy="prompt-end"), "a model without states has none"


def test_the_cache_plan_says_when_nothing_can_hit() -> None:
    assert "prefix caching: off" in plan(HYBRID, enable_prefix_caching=False)
    assert "never hits" in plan(HYBRID, mamba_cache_mode="none")
    assert "never hits" not in plan(ATTENTION, mamba_cache_mode="none")
    assert "slot" not in plan(ATTENTION)


def test_the_cache_plan_says_what_windows_keep() -> None:
    layout = layout_of([KV, replace(KV, window=1024), STATE])
    (group,) = layout.windows
    most = 99 * group.blocks_per_page
    assert f"block of a window of 1024 tokens: {group.block_bytes:,} bytes; {most:,} at most" in plan(layout)
    assert "window" not in plan(HYBRID)


def test_one_thing_is_singular() -> None:
    assert [counted(number, "slot") for number in (0, 1, 2000)] == ["0 slots", "1 slot", "2,000 slots"]


def test_operators_are_grouped_by_backend() -> None:
    backends = {"linear": "cpp", "rope": "torch", "rmsnorm": "cpp"}
    assert operators_line(backends) == "operators: 2 by cpp, 1 by torch"
    lines = operator_lines(backends, ["recurrence_decode"])
    assert lines[:2] == ["operators by cpp: linear, rmsnorm", "operators by torch: rope"]
    assert lines[2].endswith("recurrence_decode")
    assert "not needed" in operator_lines({}, [])[-1]
