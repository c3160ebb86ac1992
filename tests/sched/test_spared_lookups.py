"""A waiting request that cannot start whatever it hits is not looked up; nothing else comes of that."""

from __future__ import annotations

import pytest

from forkpoint.cache.manager import CacheManager
from forkpoint.cache.room import ArenaRoom
from forkpoint.config import SchedulerConfig
from forkpoint.routing.router import Router
from forkpoint.sim.cost import H200, CostModel
from forkpoint.sim.named_systems import make_system
from forkpoint.sim.shape import KIMI_LINEAR
from forkpoint.sim.simulator import Simulator
from forkpoint.sim.workload import make_workload

MEMORY_BYTES = 3 << 27  # a few of the requests below


@pytest.mark.parametrize(
    "workload",
    [
        "chat:sessions=40,turns=3,system=1000,gap_s=0.02,think_s=1",
        "rag:documents=8,questions=40,length=6000,gap_s=0.05",
    ],
)
def test_requests_run_as_if_each_had_been_looked_up(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_workload(workload)
    lookups = 0
    look_up = CacheManager.lookup

    def counted(*arguments: object, **options: object) -> object:
        nonlocal lookups
        lookups += 1
        return look_up(*arguments, **options)  # type: ignore[arg-type]

    def run() -> tuple[object, int]:
        nonlocal lookups
        lookups = 0
        system = make_system("forkpoint", KIMI_LINEAR, MEMORY_BYTES, SchedulerConfig(max_num_batched_tokens=2048))
        replay = Simulator(trace, [system], CostModel(KIMI_LINEAR, H200), Router("round-robin")).run()
        return replay.records, lookups

    monkeypatch.setattr(CacheManager, "lookup", counted)
    quick, num_quick = run()
    monkeypatch.setattr(ArenaRoom, "may_fit", lambda *_: True)
    monkeypatch.setattr(CacheManager, "may_hit", lambda *_: True)
    slow, num_slow = run()
    assert quick == slow
    assert num_quick < 0.9 * num_slow, (num_quick, num_slow)
