"""The emulation of vLLM against what vLLM 0.33's own scheduler did with the same prompts (docs/benchmarks/hits.json).

Blocks of 1,088 tokens (Qwen3.5-35B-A3B), one attention and three state groups, budget 8,192.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hits.cases import Case, cases, studies
from benchmarks.hits.results import read
from forkpoint.sim.shape import KIMI_LINEAR, QWEN3_5_9B, QWEN3_5_35B
from forkpoint.sim.tokens import TokenSpans
from studies.emulations.scheduler import EmulatedScheduler
from studies.emulations.vllm import VllmCache, VllmGeometry, VllmOptions
from tests.sim.driving import fresh, join, request
from tests.studies.serial import Serial

GEOMETRY = VllmGeometry.of(QWEN3_5_35B)
DEFAULT, DENSE, UNIT = VllmOptions(), VllmOptions(dense=True), VllmOptions(unit=64)
OPTIONS = {"defaults": DEFAULT, "retained": DENSE, "unit_64": UNIT}


def vllm(options: VllmOptions = DEFAULT, num_ids: int = 100_000) -> Serial:
    return Serial(EmulatedScheduler("vllm", VllmCache(GEOMETRY, num_ids, options), QWEN3_5_35B.layout, 8192, 64))


def test_geometry() -> None:
    found = read()
    assert VllmGeometry(found.settings["defaults"].block_tokens, 3, 10 * 1088 * 2048) == GEOMETRY
    assert VllmGeometry.of(QWEN3_5_9B).block_tokens == found.blocks["qwen3.5-9b"]["defaults"]
    # vLLM's own hits of this model on a GPU are multiples of 1,920 (docs/benchmarks/gpu_families.md).
    assert VllmGeometry.of(KIMI_LINEAR) == VllmGeometry(1920, 3, 7 * 1920 * 1152)


CASES = [case for case in (*cases(), *studies()) if not case.preempt_after and all(len(r) == 1 for r in case.rounds)]


@pytest.mark.parametrize("name", ["defaults", "retained", "unit_64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_cached_tokens_and_steps_are_those_of_vllm(case: Case, name: str) -> None:
    """Every request's cached tokens, and the steps of the last one's prompt."""
    engine = vllm(OPTIONS[name])
    cached = [engine.cached(request.prompt, request.output) for requests in case.rounds for request in requests]
    found = read().settings[name].cases[case.key]
    assert (cached, engine.chunks) == (found.cached, found.chunks)


@pytest.mark.parametrize(("length", "held"), [(1500, 48), (5000, 27), (20_000, 9)])
def test_room(length: int, held: int) -> None:
    """How many prompts 200 ids hold: all of them are found again, of one more not all."""

    def survivors(count: int) -> int:
        engine = vllm(num_ids=200)
        prompts = [fresh(length) for _ in range(count)]
        for prompt in prompts:
            engine.cached(prompt)
        cache = engine.system.cache
        assert isinstance(cache, VllmCache)
        return sum(_restorable(engine, prompt) > 0 for prompt in prompts)

    assert survivors(held) == held
    assert survivors(held + 2) < held + 2


@settings(max_examples=80, deadline=None)
@given(
    options=st.sampled_from([DEFAULT, DENSE, UNIT]),
    num_ids=st.integers(16, 80),
    asks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 900)), min_size=1, max_size=25),
)
def test_nothing_leaks(options: VllmOptions, num_ids: int, asks: list[tuple[int, int, int]]) -> None:
    """Whatever runs together and whoever is preempted, in the end every id is free."""
    system = vllm(options, num_ids).system
    cache = system.cache
    assert isinstance(cache, VllmCache)
    trunks = [fresh(6000) for _ in range(4)]
    accepted = finished = 0
    for index, (trunk, cut, own) in enumerate(asks):
        accepted += system.add(request(f"r{index}", join(trunks[trunk].part(0, cut * 150), fresh(own)), 1 + own))
        if index % 3 == 0 and system.plan(0.0) is not None:
            finished += len(system.finish(0.0).finished)
    while system.num_unfinished():
        assert system.plan(0.0) is not None
        finished += len(system.finish(0.0).finished)
    assert finished == accepted
    assert len(cache._free) == cache.num_ids and not any(block.num_users for block in cache._free)
    assert all(block.key == key for key, equal in cache._cached.items() for block in equal)


def _restorable(engine: Serial, prompt: TokenSpans) -> int:
    return engine.system.restorable(request("probe", prompt))


def test_equal_blocks_all_stay() -> None:
    """A prompt that finds keys and values but no state computes its blocks anew: vLLM's pool has both from then on."""
    cache, shared = VllmCache(GEOMETRY, 100_000, DEFAULT), fresh(3000)
    engine = Serial(EmulatedScheduler("vllm", cache, QWEN3_5_35B.layout, 8192, 64))
    engine.ask(join(shared, fresh(2000)))
    report = engine.ask(join(shared, fresh(2000)))
    assert report.num_cached_tokens == 0 and report.kv_num_tokens == 2176
    assert [len(equal) for equal in cache._cached.values()].count(2) == 2
