"""Full foresight in the real simulator: below the bound, above the default, and for the simulator alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layer_spec import KVSpec
from forkpoint.config import SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.sim.cases import Case, CaseResult, run_case
from forkpoint.sim.cost import H200
from forkpoint.sim.shape import KIMI_LINEAR, QWEN3_5_9B, ModelShape
from forkpoint.sim.trace import Trace, TraceRequest
from forkpoint.sim.workload import make_workload
from studies.bound import ReuseProblem, by_arrival, clairvoyant_bound, hashes_of
from studies.foresight import Foresight
from studies.systems import CLAIRVOYANT, ENGINE, make_system
from tests.cache.shapes import state
from tests.sim.driving import as_requests, fresh, join, request

SCHEDULER = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=4)
TINY = ModelShape(  # a page holds a state or two blocks
    name="tiny",
    layers=((KVSpec.of(1, 32, 32, "bfloat16"),), (state((1, 1), (1, 64, 63), "float32"),)),
    hidden_size=64,
    num_weights=10_000,
    head_weights=1000,
    flops_per_pair=128,
)


def served(trace: Trace, system: str, shape: ModelShape, memory_bytes: int) -> CaseResult:
    return run_case(Case(trace, shape, H200, system, memory_bytes, SCHEDULER, factory=make_system))


def one_by_one(requests: list[TraceRequest]) -> Trace:
    return Trace("one by one", tuple(replace(r, arrival_s=100.0 * i) for i, r in enumerate(requests)))


paths_strategy = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=2, max_size=9)


@settings(max_examples=60, deadline=None)
@given(paths=paths_strategy, num_blocks=st.integers(10, 24))
def test_foresight_does_not_beat_the_bound(paths: list[tuple[int, ...]], num_blocks: int) -> None:
    trace, layout = one_by_one(as_requests(paths)), TINY.layout
    memory = num_blocks * layout.block_bytes // layout.page_bytes * layout.page_bytes
    bound = clairvoyant_bound(
        ReuseProblem.of(by_arrival(trace)), memory, layout.block_bytes, layout.slot_bytes, num_bins=8, num_rounds=60
    )
    for system in (CLAIRVOYANT, ENGINE):
        assert served(trace, system, TINY, memory).hit_tokens <= bound.worth + 1e-6


@settings(max_examples=30, deadline=None)
@given(paths=paths_strategy)
def test_with_room_for_all_everything_is_reused(paths: list[tuple[int, ...]]) -> None:
    trace = one_by_one(as_requests(paths))
    unlimited = ReuseProblem.of(by_arrival(trace)).unlimited
    assert served(trace, CLAIRVOYANT, TINY, 1 << 22).hit_tokens == unlimited


@pytest.mark.parametrize(
    "workload",
    [
        "chat:sessions=30,turns=3,answer=80",
        "agents:sessions=4,answer=60",
        "rag:documents=30,questions=60,answer=50",
        "tree:problems=6,problem=6000,step=100",
    ],
)
def test_foresight_is_better_than_the_default_where_room_is_short(workload: str) -> None:
    trace, scheduler = make_workload(workload), SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64)
    cases = [
        Case(trace, KIMI_LINEAR, H200, system, 3 << 28, scheduler, factory=make_system)
        for system in (CLAIRVOYANT, ENGINE)
    ]
    foreseen, learnt = (run_case(case) for case in cases)
    assert foreseen.num_refused == learnt.num_refused == 0
    assert foreseen.hit_tokens > learnt.hit_tokens


def test_what_comes_back_stays() -> None:
    """Room for two conversations; of three the oldest one goes on."""
    first, answer = fresh(640), fresh(64)
    requests = [
        request("a0", first, answer),
        request("b0", fresh(640), 64),
        request("c0", fresh(640), 64),
        request("a1", join(first, answer, fresh(40))),
    ]
    memory = 16 * TINY.layout.page_bytes
    assert served(one_by_one(requests), CLAIRVOYANT, TINY, memory).hit_tokens == 640
    assert served(one_by_one(requests), f"{ENGINE}:eviction=lru", TINY, memory).hit_tokens == 0


def test_states_are_kept_where_requests_resume() -> None:
    """Prompts part after 5 blocks, which nobody declares; the first one stores a state there already."""
    shared = fresh(320)
    trace = one_by_one([request(f"r{i}", join(shared, fresh(200))) for i in range(3)])
    assert served(trace, CLAIRVOYANT, TINY, 1 << 22).hit_tokens == 2 * 320
    assert Foresight(trace).breakpoints("r0") == Foresight(trace).breakpoints("r1") == (320,)
    assert Foresight(trace).breakpoints("r2") == ()


def test_nobody_is_said_to_resume_inside_an_output() -> None:
    """An engine keeps the state at the last boundary of an output, and none before; then at the prompt's."""
    prompt, answer = fresh(130), fresh(300)
    edited = request("edited", join(prompt, answer.part(0, 150), fresh(50)))
    continued = request("continued", join(prompt, answer, fresh(50)))
    first = request("first", prompt, answer)
    assert Foresight(one_by_one([first, edited])).breakpoints("first") == (128,)
    assert Foresight(one_by_one([first, continued])).breakpoints("first") == (384,)


def target(asked: TraceRequest, num_tokens: int) -> BlockHash:
    return hashes_of(asked)[num_tokens // 64 - 1]


def test_how_long_until_the_next_use() -> None:
    prompt, answer = fresh(128), fresh(65)
    first = request("first", prompt, answer)
    second = request("second", join(prompt, answer, fresh(10)), 1, after="first", think_s=7.0)
    third = request("third", join(prompt, answer, fresh(20)), 1, after="second", think_s=5.0)
    other = request("other", fresh(64), 1, arrival_s=50.0)
    foresight = Foresight(Trace("turns", (first, second, third, other)))
    block = target(first, 192)
    assert foresight.wait_s(block) == 1.0 + 7.0  # a second is assumed for a request
    foresight.arrive("first")
    foresight.now_s = 2.0
    foresight.start("first")
    assert foresight.wait_s(block) == 1.0 + 7.0
    foresight.now_s = 6.0
    assert foresight.wait_s(block) == 7.0  # it takes longer than assumed
    foresight.finish("first")
    foresight.now_s = 10.0
    assert foresight.wait_s(block) == 3.0
    foresight.arrive("second")
    assert foresight.wait_s(block) == 0.0
    foresight.start("second")
    assert 5.0 < foresight.wait_s(block) < 7.0
    foresight.refuse("third")
    assert foresight.wait_s(block) == foresight.wait_s(target(other, 64)) == math.inf


def test_where_it_cannot_be_had() -> None:
    trace = make_workload("chat:sessions=2")
    for system, message in ((CLAIRVOYANT, "replica"), (f"{CLAIRVOYANT},capture=dense", "no eviction policy")):
        with pytest.raises(ConfigError, match=message):
            run_case(Case(trace, QWEN3_5_9B, H200, system, 4 << 30, SCHEDULER, num_replicas=2, factory=make_system))
    with pytest.raises(ConfigError, match="no states"):
        make_system(CLAIRVOYANT, replace(QWEN3_5_9B, layers=QWEN3_5_9B.layers[:8]), 4 << 30, SCHEDULER, trace)
    foreseen = make_system(CLAIRVOYANT, QWEN3_5_9B, 4 << 30, SCHEDULER, trace)
    with pytest.raises(ConfigError, match="not of the trace"):
        foreseen.add(request("stranger", fresh(100)))
