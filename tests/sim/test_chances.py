"""The ideal cache that knows chances of return, judged on conversations that it has not learnt from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forkpoint.sim.bound import ReuseProblem
from forkpoint.sim.chances import AGES_S, StateSet, age_bin, expected_uses, known_chances
from forkpoint.sim.endings import History, Stay
from forkpoint.sim.shape import KIMI_LINEAR, QWEN3_5_9B, ModelShape
from forkpoint.sim.trace import Trace, TraceRequest
from forkpoint.sim.workload import make_workload
from tests.sim.driving import fresh, join, request

REUSABLE = 15 * 64  # of 999 + 1 tokens
SLOT = QWEN3_5_9B.layout.slot_bytes
ROOM = SLOT + 1000 * QWEN3_5_9B.kv_token_bytes
PLENTY = 100 << 30


def history_of(trace: Trace, service_s: float = 0.0) -> History:
    """Every request stays for `service_s`, however much it finds."""
    return History.of(trace, {name: Stay(t, t + service_s) for name, t in trace.arrival_times().items()})


def reached(trace: Trace, memory_bytes: int, service_s: float = 0.0, shape: ModelShape = QWEN3_5_9B) -> float:
    return known_chances(history_of(trace, service_s), shape, memory_bytes)


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
    return Trace("pairs", tuple(replace(r, session=r.id.split("-")[0]) for r in requests))


def edited(count: int, parts_at: int) -> Trace:
    """Conversations of one prompt of 20,000 tokens that comes back once, other than before from `parts_at` on."""
    requests = []
    for index in range(count):
        prompt = fresh(20_000)
        requests.append(request(f"{index}-0", prompt, arrival_s=10.0 * index))
        back = join(prompt.part(0, parts_at), fresh(500))
        requests.append(request(f"{index}-1", back, arrival_s=10.0 * index + 5))
    return Trace("edited", tuple(replace(r, session=r.id.split("-")[0]) for r in requests))


def test_with_room_for_all_every_turn_is_found() -> None:
    assert reached(pairs(10, 25.0), PLENTY) == 10 * REUSABLE


def test_with_room_for_none_nothing_is() -> None:
    assert reached(pairs(10, 25.0), ROOM - 1) == 0


def test_running_requests_take_their_room() -> None:
    """A prompt that waits for its next turn, and another that runs meanwhile."""
    first, answer = fresh(999), fresh(1)
    trace = Trace(
        "beside",
        (
            request("a", first, answer),
            request("beside", fresh(999), arrival_s=10.0),
            request("b", join(first, answer, fresh(50)), arrival_s=30.0),
        ),
    )
    assert reached(trace, 2 * ROOM, service_s=5.0) == REUSABLE
    assert reached(trace, 2 * ROOM - 1, service_s=5.0) == 0


def test_a_turn_that_comes_before_the_last_one_ended_needs_no_room() -> None:
    assert reached(pairs(10, 25.0), 0, service_s=30.0) == 10 * REUSABLE


@pytest.mark.parametrize(("parts_at", "found"), [(19_950, 19_904), (9_000, 8192), (4_000, 0)])
def test_an_edited_prompt_is_found_up_to_a_state(parts_at: int, found: int) -> None:
    """The end of the prompt serves nobody; states just before it and inside it do."""
    assert reached(edited(8, parts_at), PLENTY) == 8 * found


def test_states_inside_have_to_be_paid_for() -> None:
    """One prompt at a time waits. Where there is room for its keys and values, but not for a state beside that of its
    end, it is not found; with room for a state at the end and one inside it is."""
    trace, kv_bytes = edited(8, 9_000), 20_001 * KIMI_LINEAR.kv_token_bytes
    slot = KIMI_LINEAR.layout.slot_bytes
    assert reached(trace, kv_bytes + slot, shape=KIMI_LINEAR) == 0
    assert reached(trace, kv_bytes + 4 * slot, shape=KIMI_LINEAR) == 8 * 8192


def test_declared_states_are_kept() -> None:
    trace = edited(8, 4_000)
    declared = Trace("declared", tuple(replace(r, breakpoints=(3_000,)) for r in trace.requests))
    assert reached(declared, PLENTY) == 8 * (3_000 // 64 * 64)


def test_what_does_not_go_on_gives_way() -> None:
    """Room for five ends of the conversations that go on, each the last of a turn of its own size; those that never do
    take ten times that room between two turns."""
    trace = pairs(40, 25.0, ending=8)
    assert reached(trace, 5 * ROOM + 5000 * QWEN3_5_9B.kv_token_bytes + SLOT) > 0.9 * 40 * REUSABLE
    history = history_of(trace)
    expected = expected_uses(history)
    goes_on = np.asarray([ending.follower is not None for ending in history.endings])
    first = np.asarray([history.visits[ending.visit].turn.number == 0 for ending in history.endings])
    assert expected[goes_on, 0].min() > 10 * expected[~goes_on & first, 0].max()


def test_nothing_is_judged_by_its_own_outcome() -> None:
    """One conversation goes on, of a size of its own: nobody else tells that it would."""
    history = history_of(pairs(1, 25.0, ending=6))
    [mine] = [index for index, ending in enumerate(history.endings) if ending.follower is not None]
    assert expected_uses(history)[mine].max() < 1e-6


def test_an_end_is_worth_most_just_before_it_is_used() -> None:
    worth = expected_uses(history_of(pairs(60, 50.0)))[0]
    assert worth[: age_bin(50.0) + 1].tolist() == sorted(worth[: age_bin(50.0) + 1].tolist())
    assert worth[age_bin(80.0)] < 0.2 * worth[age_bin(50.0)]


def test_tools_and_people_are_told_apart() -> None:
    """Of turns alike but for who answers next, tools answer within 5 s and people never."""
    requests = []
    for index in range(40):
        prompt, answer, calls = fresh(999), fresh(1), index % 2 == 0
        requests.append(request(f"{index}-0", prompt, answer, arrival_s=20.0 * index, awaits_tool=calls))
        if calls:
            requests.append(request(f"{index}-1", join(prompt, answer, fresh(50)), arrival_s=20.0 * index + 5))
    trace = Trace("tools", tuple(replace(r, session=r.id.split("-")[0]) for r in requests))
    history = history_of(trace)
    expected = expected_uses(history)[:, 0]
    firsts = [history.visits[ending.visit].turn for ending in history.endings]
    by_tool = [worth for worth, turn in zip(expected, firsts, strict=True) if turn.awaits_tool]
    by_person = [
        worth for worth, turn in zip(expected, firsts, strict=True) if turn.number == 0 and not turn.awaits_tool
    ]
    assert min(by_tool) > 5 * max(by_person)


def test_what_first_turns_share_needs_no_room() -> None:
    shared = fresh(640)
    trace = Trace("shared", tuple(request(f"{i}", join(shared, fresh(100)), arrival_s=10.0 * i) for i in range(5)))
    assert reached(trace, 1) == 4 * 640


@pytest.mark.parametrize("workload", ["chat:sessions=40", "agents:sessions=12"])
def test_never_beyond_what_there_is(workload: str) -> None:
    """With arrivals of their own, and with think times."""
    trace = make_workload(workload)
    found = [reached(trace, mib << 20, service_s=1.0) for mib in (50, 200, 800, 1 << 20)]
    unlimited = ReuseProblem.of(trace.by_arrival()).unlimited
    assert found[0] < found[1] < found[3] <= unlimited
    assert found[3] > 0.9 * unlimited


def test_places_of_states() -> None:
    prompt = history_of(Trace("one", (request("a", fresh(20_000), 200, breakpoints=(1_000,)),))).visits[0]
    everything = StateSet(prompt_end=True, output_end=True, near_end=True, step=8192)
    usable = 19_999 // 64 * 64
    assert everything.ends(prompt, beyond=0) == [usable, 20_199 // 64 * 64]
    assert everything.inside(prompt, beyond=0) == [960, 8192, usable - 64]
    assert everything.inside(prompt, beyond=8192) == [usable - 64]
    assert StateSet().ends(prompt, beyond=0) == []


def test_ages() -> None:
    assert [age_bin(age) for age in (0.0, 9.9, 10.0, 1e9)] == [0, 0, 1, len(AGES_S) - 1]
