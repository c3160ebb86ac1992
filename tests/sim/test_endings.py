"""Which request goes on from which, when, and what it finds."""

from __future__ import annotations

import math
from dataclasses import replace

from forkpoint.sim.endings import History, Stay
from forkpoint.sim.trace import Trace
from tests.sim.driving import fresh, join, request


def test_turns_of_a_conversation() -> None:
    first, answer, more, reply = fresh(200), fresh(100), fresh(300), fresh(10)
    second = join(first, answer, more)
    requests = (
        request("a", first, answer),
        request("b", second, reply, after="a", think_s=7.0, awaits_tool=True),
        request("c", join(second, reply, fresh(50)), after="b", think_s=1.0),
    )
    trace = Trace("turns", tuple(replace(r, session="one") for r in requests))
    history = History.of(trace, {"a": Stay(0.0, 2.0), "b": Stay(9.0, 12.0), "c": Stay(13.0, 20.0)})
    assert [visit.before for visit in history.visits] == [None, 0, 1]
    assert [visit.reusable for visit in history.visits] == [0, 256, 576]  # whole blocks of 299 and of 609 tokens
    assert [visit.turn for visit in history.visits] == [(0, 200, False), (1, 344, True), (2, 84, False)]
    assert [visit.own_tokens for visit in history.visits] == [300, 610, 661]
    assert [(e.visit, e.since_s, e.gap_s, e.follower, e.left_s) for e in history.endings] == [
        (0, 2.0, 7.0, 1, 18.0),
        (1, 12.0, 1.0, 2, 8.0),
        (2, 20.0, math.inf, None, 0.0),
    ]


def test_one_prompt_that_several_go_on_from() -> None:
    """The second waits from the first one's arrival on; a third that comes while it runs waits for nothing."""
    prompt = fresh(640)
    names = ("a", "b", "c", "d")
    arrivals = (0.0, 10.0, 4.0, 25.0)
    trace = Trace("branches", tuple(request(name, join(prompt, fresh(100))) for name in names))
    stays = {name: Stay(when, when + 5.0) for name, when in zip(names, arrivals, strict=True)}
    history = History.of(trace, stays)
    assert [visit.request.id for visit in history.visits] == ["a", "c", "b", "d"]
    assert history.shared == 640  # what most of them find: none goes on from another
    assert {ending.follower for ending in history.endings} == {None}

    alone = Trace("alone", tuple(request(f"x{index}", fresh(100)) for index in range(5)))
    both = Trace("both", (*trace.requests, *alone.requests))
    history = History.of(both, {**stays, **{f"x{index}": Stay(50.0, 51.0) for index in range(5)}})
    waits = [
        (history.visits[e.visit].request.id, e.since_s, e.gap_s) for e in history.endings if e.follower is not None
    ]
    assert history.shared == 0
    assert waits == [("a", 5.0, 0.0), ("c", 9.0, 1.0), ("b", 15.0, 10.0)]
