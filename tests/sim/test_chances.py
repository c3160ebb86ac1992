"""The ideal cache that knows chances of return, judged on conversations that it has not learnt from."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.sim.bound import ReuseProblem
from forkpoint.sim.chances import AGES_S, age_bin, expected_uses, find_endings, known_chances
from forkpoint.sim.shape import QWEN3_5_9B
from forkpoint.sim.trace import Trace, TraceRequest
from forkpoint.sim.workload import make_workload
from tests.sim.driving import fresh, join, request

REUSABLE = 15 * 64  # of 999 + 1 tokens
ROOM = QWEN3_5_9B.layout.slot_bytes + 1000 * QWEN3_5_9B.kv_token_bytes


def pairs(count: int, gap_s: float, ending: int = 0) -> Trace:
    """Conversations of two turns, the first of 999 + 1 tokens, 10 s apart; after each, `ending` others of 5,000 tokens
    that never go on."""
    requests: list[TraceRequest] = []
    for index in range(count):
        prompt, answer = fresh(999), fresh(1)
        first = request(f"{index}-0", prompt, answer, arrival_s=10.0 * index)
        second = request(f"{index}-1", join(prompt, answer, fresh(50)), arrival_s=10.0 * index + gap_s)
        others = [request(f"{index}x{n}-0", fresh(5000), fresh(1), arrival_s=10.0 * index + n) for n in range(ending)]
        requests += [first, second, *others]
    named = [type(r)(r.id, r.id.split("-")[0], r.prompt, r.output, r.arrival_s) for r in requests]
    return Trace("pairs", tuple(named))


def reached(trace: Trace, memory_bytes: int) -> float:
    return known_chances(trace, ReuseProblem.of(trace.by_arrival()), QWEN3_5_9B, memory_bytes)


def test_with_room_for_all_every_turn_is_found() -> None:
    assert reached(pairs(10, 25.0), 100 << 30) == 10 * REUSABLE


def test_with_room_for_none_nothing_is() -> None:
    assert reached(pairs(10, 25.0), ROOM - 1) == 0


def test_what_does_not_go_on_gives_way() -> None:
    """Room for five ends of the conversations that go on, each the last of a turn of its own size; those that never do
    take ten times that room between two turns."""
    trace = pairs(40, 25.0, ending=8)
    assert reached(trace, 5 * ROOM) > 0.9 * 40 * REUSABLE
    _, endings = find_endings(trace, ReuseProblem.of(trace.by_arrival()))
    expected = expected_uses(endings)
    goes_on = np.asarray([ending.gap_s < 1e9 for ending in endings])
    first = np.asarray([ending.turn.number == 0 for ending in endings])
    assert expected[goes_on, 0].min() > 10 * expected[~goes_on & first, 0].max()


def test_nothing_is_judged_by_its_own_outcome() -> None:
    """One conversation goes on, of a size of its own: nobody else tells that it would."""
    trace = pairs(1, 25.0, ending=6)
    _, endings = find_endings(trace, ReuseProblem.of(trace.by_arrival()))
    [mine] = [index for index, ending in enumerate(endings) if ending.gap_s < 1e9]
    assert expected_uses(endings)[mine].max() < 1e-6


def test_an_end_is_worth_most_just_before_it_is_used() -> None:
    trace = pairs(60, 50.0)
    _, endings = find_endings(trace, ReuseProblem.of(trace.by_arrival()))
    worth = expected_uses(endings)[0]
    assert worth[: age_bin(50.0) + 1].tolist() == sorted(worth[: age_bin(50.0) + 1].tolist())
    assert worth[age_bin(80.0)] < 0.2 * worth[age_bin(50.0)]


def test_what_first_turns_share_needs_no_room() -> None:
    shared = fresh(640)
    trace = Trace("shared", tuple(request(f"{i}", join(shared, fresh(100)), arrival_s=10.0 * i) for i in range(5)))
    assert reached(trace, 1) == 4 * 640


def test_never_beyond_what_there_is() -> None:
    trace = make_workload("chat:sessions=40")
    found = [reached(trace, mib << 20) for mib in (50, 200, 800, 1 << 20)]
    assert found[0] < found[1] < found[3]
    assert found[3] == pytest.approx(ReuseProblem.of(trace.by_arrival()).unlimited, rel=0.01)


def test_ages() -> None:
    assert [age_bin(age) for age in (0.0, 9.9, 10.0, 1e9)] == [0, 0, 1, len(AGES_S) - 1]
