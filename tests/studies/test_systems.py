"""All systems in the simulator: below the bound, and the engine beside vLLM where room is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forkpoint.config import SchedulerConfig
from forkpoint.sim.cases import Case, run_cases
from forkpoint.sim.cost import H200
from forkpoint.sim.shape import QWEN3_5_9B, QWEN3_5_35B
from forkpoint.sim.workload import make_workload
from studies.bound import ReuseProblem, by_arrival, clairvoyant_bound
from studies.emulations.vllm import VllmGeometry
from studies.systems import make_system
from tests.sim.driving import reused_by_talk, take_turns


@pytest.mark.parametrize(
    "spec",
    [
        "chat:sessions=15,answer=60",
        "agents:sessions=2,turns=6",
        "rag:questions=60,answer=80",
        "tree:problems=2,step=100",
    ],
)
def test_every_system_serves_every_workload_below_the_bound(spec: str) -> None:
    trace = make_workload(spec)
    one_by_one = [replace(item, arrival_s=30.0 * i, after=None) for i, item in enumerate(trace.requests)]
    trace = replace(trace, requests=tuple(one_by_one))
    scheduler, layout = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64), QWEN3_5_9B.layout
    systems = ("forkpoint", "vllm", "vllm-dense", "vllm-unit64", "sglang")
    cases = [Case(trace, QWEN3_5_9B, H200, name, 6 << 30, scheduler, factory=make_system) for name in systems]
    results = run_cases(cases, jobs=1)
    problem = ReuseProblem.of(by_arrival(trace))
    bound = clairvoyant_bound(problem, 6 << 30, layout.block_bytes, layout.slot_bytes, num_rounds=30).worth
    for result in results:
        assert result.num_refused == 0 and result.hit_tokens <= bound, result.system
        assert result.hit_rate > 0, result.system


def test_two_alternating_conversations_on_the_pages_of_vllm() -> None:
    """60 of vLLM's ids of a model of 35B, conversations that grow until both no longer fit: it falls to a third."""
    requests = take_turns(300, 700, num_turns=28)
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64)
    memory = 60 * VllmGeometry.of(QWEN3_5_35B).id_bytes
    theirs, ours = (
        reused_by_talk(requests, QWEN3_5_35B, make_system(name, QWEN3_5_35B, memory, scheduler))
        for name in ("vllm", "forkpoint")
    )
    assert sum(theirs) / 2 == pytest.approx(0.33, abs=0.02)
    assert min(ours) > 0.45
