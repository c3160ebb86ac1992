"""Where the requests of a trace end, and how and when later ones go on from there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forkpoint.cache.reuse import Turn
from forkpoint.sim.bound import BLOCK, ReuseProblem
from forkpoint.sim.trace import Trace, TraceRequest


class Stay(NamedTuple):
    """When a request arrived and when it ended."""

    arrival_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Visit:
    """A request as the cache sees it. `reusable` tokens of its prompt were there before, in whole blocks; `before` is
    the visit that it goes on from, by its place; `own_tokens` lie beyond what conversations usually share."""

    request: TraceRequest
    stay: Stay
    turn: Turn
    reusable: int
    before: int | None
    own_tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of visit `visit` at `since_s`, or its next wait after it was used. `gap_s` later visit `follower` goes on
    from it (infinity: none does); `left_s` is the time until the trace ends."""

    visit: int
    since_s: float
    gap_s: float
    follower: int | None
    left_s: float


@dataclass(frozen=True, slots=True)
class History:
    """All visits in the order of arrival, their endings, and the tokens at the beginning that conversations usually
    share."""

    visits: tuple[Visit, ...]
    endings: tuple[Ending, ...]
    shared: int

    @classmethod
    def of(cls, trace: Trace, stays: Mapping[str, Stay]) -> History:
        """What a trace was like, given how long each of its requests stayed."""
        order = sorted(trace.requests, key=lambda request: stays[request.id].arrival_s)
        problem = ReuseProblem.of(order)
        reusable = BLOCK * np.diff(problem.first)
        shared = _usual_share(order, reusable)
        visits: list[Visit] = []
        for index, request in enumerate(order):
            found, before = int(reusable[index]), None
            if found > shared:
                before = int(problem.last[problem.first[index + 1] - 1])
            number = 0 if before is None else visits[before].turn.number + 1
            turn = Turn(number, request.num_prompt_tokens - found, request.awaits_tool)
            own = max(request.num_prompt_tokens + request.num_output_tokens - shared, 0)
            visits.append(Visit(request, stays[request.id], turn, found, before, own))
        return cls(tuple(visits), tuple(_endings(visits)), shared)


def _usual_share(order: Sequence[TraceRequest], reusable: npt.NDArray[np.int64]) -> int:
    """What the first turn of half of all sessions, or of more, finds at least."""
    first: dict[str, int] = {}
    for request, num_tokens in zip(order, reusable.tolist(), strict=True):
        first.setdefault(request.session, num_tokens)
    return sorted(first.values())[len(first) // 2]


def _endings(visits: Sequence[Visit]) -> list[Ending]:
    followers: list[list[int]] = [[] for _ in visits]
    for index, visit in enumerate(visits):
        if visit.before is not None:
            followers[visit.before].append(index)
    last_s = max((visit.stay.end_s for visit in visits), default=0.0)
    endings = []
    for index, visit in enumerate(visits):
        since = visit.stay.end_s
        for follower in followers[index]:
            arrival = visits[follower].stay.arrival_s
            endings.append(Ending(index, since, max(arrival - since, 0.0), follower, last_s - since))
            since = max(since, arrival)
        if not followers[index]:
            endings.append(Ending(index, since, math.inf, None, last_s - since))
    return endings
