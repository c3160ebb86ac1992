"""The ceiling of policies that keep conversations by class and age."""

from __future__ import annotations

import pytest

from forkpoint.sim.shape import QWEN3_5_9B
from forkpoint.sim.thresholds import threshold_ceiling
from forkpoint.sim.trace import Trace
from forkpoint.sim.workload import make_workload
from tests.sim.driving import fresh, join, request


def pairs(count: int, gap_s: float) -> Trace:
    """Conversations of two turns, the first of 999 + 1 tokens."""
    requests = []
    for index in range(count):
        prompt, answer = fresh(999), fresh(1)
        first = request(f"{index}-0", prompt, answer, arrival_s=100.0 * index)
        second = request(f"{index}-1", join(prompt, answer, fresh(50)), arrival_s=100.0 * index + gap_s)
        requests += [first, second]
    named = [type(r)(r.id, r.id.split("-")[0], r.prompt, r.output, r.arrival_s) for r in requests]
    return Trace("pairs", tuple(named))


def test_with_room_for_all_every_turn_is_found() -> None:
    assert threshold_ceiling(pairs(10, 20.0), QWEN3_5_9B, 100 << 30) == pytest.approx(10_000)


def test_a_tenth_of_the_room_serves_a_tenth() -> None:
    trace = pairs(10, 20.0)
    room = QWEN3_5_9B.layout.slot_bytes + 1000 * QWEN3_5_9B.kv_token_bytes
    needed = 10 * 20.0 * room / max(trace.arrival_times().values())
    assert threshold_ceiling(trace, QWEN3_5_9B, int(needed / 10)) == pytest.approx(1000, rel=0.1)


def test_more_memory_is_never_worse() -> None:
    trace = make_workload("chat:sessions=40")
    found = [threshold_ceiling(trace, QWEN3_5_9B, mib << 20) for mib in (50, 100, 200, 400, 800)]
    assert found == sorted(found) and found[0] < found[-1]
