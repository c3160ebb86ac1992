"""The ceiling of policies that keep conversations by class and age."""

from __future__ import annotations

import pytest

from forkpoint.sim.bound import ReuseProblem
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


def ceiling(trace: Trace, memory_bytes: int) -> float:
    return threshold_ceiling(trace, ReuseProblem.of(trace.by_arrival()), QWEN3_5_9B, memory_bytes)


REUSABLE = 15 * 64  # of 999 + 1 tokens


def test_with_room_for_all_every_turn_is_found() -> None:
    assert ceiling(pairs(10, 20.0), 100 << 30) == pytest.approx(10 * REUSABLE)


def test_a_tenth_of_the_room_serves_a_tenth() -> None:
    trace = pairs(10, 20.0)
    room = QWEN3_5_9B.layout.slot_bytes + 1000 * QWEN3_5_9B.kv_token_bytes
    needed = 10 * 20.0 * room / max(trace.arrival_times().values())
    assert ceiling(trace, int(needed / 10)) == pytest.approx(REUSABLE, rel=0.1)


def test_what_first_turns_share_needs_no_room() -> None:
    shared = fresh(640)
    trace = Trace("shared", tuple(request(f"{i}", join(shared, fresh(100)), arrival_s=10.0 * i) for i in range(5)))
    assert ceiling(trace, 1) == pytest.approx(4 * 640)


def test_more_memory_is_never_worse_and_never_beyond_what_there_is() -> None:
    trace = make_workload("chat:sessions=40")
    found = [ceiling(trace, mib << 20) for mib in (50, 100, 200, 400, 800)]
    assert found == sorted(found) and found[0] < found[-1]
    assert found[-1] <= ReuseProblem.of(trace.by_arrival()).unlimited
