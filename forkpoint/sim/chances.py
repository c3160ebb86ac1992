"""What an ideal cache reaches that knows how likely conversations are to go on, and when, but not which ones do.

It keeps the ends of requests, each as a whole or not at all, with one state each. Running requests and anything else
take no room, and the prefix that conversations usually share is always there. What gives way is worth least: the uses
expected for the time held, up to the best age to give it up at, for the tokens saved and the bytes taken.

Chances are those of the classes that the engine's own policy tells apart (`cache/reuse.py`): the number of a turn and
its size, by age. Those of one half of the sessions are learnt from the whole other half, so that no conversation is
judged by its own outcome. It is an estimate for policies of this family, not a bound for all: one that knows more than
turns, sizes and ages may do better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from forkpoint.cache.reuse import MOST_USES, NUM_SIZES, ReuseClass, ReuseKind, Turn
from forkpoint.sim.bound import BLOCK, FloatArray, ReuseProblem
from forkpoint.sim.shape import ModelShape
from forkpoint.sim.trace import Trace, TraceRequest

_AGES_S: Final = (0, 10, 20, 30, 45, 60, 75, 90, 105, 120, 150, 180, 240, 300, 420, 600, 900, 1800, 3600, 7200)
AGES_S: Final = np.asarray(_AGES_S, np.float64)  # bin k is [AGES_S[k], AGES_S[k + 1]), the last one without end
ASSUMED_ENDS: Final = 2.0  # a class is taken to go on as all do until about so many of its ends were seen


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request at `time_s`, or its next wait after it was used. `gap_s` later another request goes on from
    it (infinity: none does) and reuses `gain` tokens beyond the shared prefix; `own_tokens` of its own are beyond that;
    `left_s` is the time until the trace ends."""

    session: str
    turn: Turn
    own_tokens: int
    time_s: float
    gap_s: float
    gain: float
    left_s: float

    @property
    def known(self) -> int:
        """The class that it belongs to: what is known of it when it ends."""
        return ReuseClass.of_turn(ReuseKind.CONVERSATION, self.turn).number


def known_chances(trace: Trace, problem: ReuseProblem, shape: ModelShape, memory_bytes: int) -> float:
    """Tokens reused; arrivals as in `Trace.by_arrival`, whose `problem` this is."""
    shared, endings = find_endings(trace, problem)
    rooms = shape.layout.slot_bytes + np.asarray([e.own_tokens for e in endings], np.float64) * shape.kv_token_bytes
    saved = np.asarray([e.own_tokens for e in endings], np.float64)
    worth = expected_uses(endings) * (saved / rooms)[:, None]
    return shared + _replay(endings, worth, rooms, memory_bytes)


def find_endings(trace: Trace, problem: ReuseProblem) -> tuple[float, list[Ending]]:
    """(tokens reused of the prefix that conversations usually share, the ends of all requests)."""
    order, arrivals = trace.by_arrival(), trace.arrival_times()
    reusable = BLOCK * np.diff(problem.first)
    shared = _usual_share(order, reusable)
    times = [arrivals[request.id] for request in order]
    followers: list[list[int]] = [[] for _ in order]
    numbers = [0] * len(order)
    for index in np.flatnonzero(reusable > shared).tolist():
        before = int(problem.last[problem.first[index + 1] - 1])
        followers[before].append(index)
        numbers[index] = numbers[before] + 1
    endings = []
    for index, request in enumerate(order):
        turn = Turn(numbers[index], request.num_prompt_tokens - int(reusable[index]))
        own, since = max(request.num_prompt_tokens + request.num_output_tokens - shared, 0), times[index]
        waits = [(times[follower] - since, float(reusable[follower] - shared)) for follower in followers[index]]
        starts = [since, *(since + gap for gap, _ in waits[:-1])]
        for start, (gap, gain) in zip(starts, waits or [(math.inf, 0.0)], strict=True):
            endings.append(Ending(request.session, turn, own, start, gap - (start - since), gain, times[-1] - start))
    return float(np.minimum(reusable, shared).sum()), endings


def _usual_share(order: Sequence[TraceRequest], reusable: npt.NDArray[np.int64]) -> int:
    """What the first turn of half of all sessions, or of more, finds at least."""
    first: dict[str, int] = {}
    for request, num_tokens in zip(order, reusable.tolist(), strict=True):
        first.setdefault(request.session, num_tokens)
    return sorted(first.values())[len(first) // 2]


def expected_uses(endings: Sequence[Ending]) -> FloatArray:
    """`[ends, ages]`: from each age on, the most uses for every second held, over the ages to give it up at."""
    halves = {session: place % 2 for place, session in enumerate(sorted({ending.session for ending in endings}))}
    half = np.asarray([halves[ending.session] for ending in endings])
    known = np.asarray([ending.known for ending in endings])
    uses, held = np.zeros((len(endings), len(AGES_S))), np.zeros((len(endings), len(AGES_S)))
    widths = np.diff(np.append(AGES_S, np.inf))
    for index, ending in enumerate(endings):
        held[index] = np.clip(min(ending.gap_s, ending.left_s) - AGES_S, 0, widths)
        if ending.gap_s < math.inf:
            uses[index, age_bin(ending.gap_s)] = 1
    best = np.zeros_like(uses)
    for side in (0, 1):
        learnt_from, judged = half != side, half == side
        rates = _class_rates(known[learnt_from], uses[learnt_from], held[learnt_from])
        best[judged] = _best_from_each(rates)[known[judged]]
    return best


def _class_rates(known: npt.NDArray[np.int64], uses: FloatArray, held: FloatArray) -> FloatArray:
    """Uses a second, by class and age."""
    by_age = uses.sum(axis=0) / np.maximum(held.sum(axis=0), 1e-9)
    survived = np.exp(-np.cumsum(np.append(0, by_age[:-1] * np.diff(AGES_S))))
    assumed_held = ASSUMED_ENDS * survived * np.append(np.diff(AGES_S), AGES_S[-1])
    all_uses = np.tile(assumed_held * by_age, ((MOST_USES + 1) * NUM_SIZES, 1))
    all_held = np.tile(assumed_held, (len(all_uses), 1))
    np.add.at(all_uses, known, uses)
    np.add.at(all_held, known, held)
    rates: FloatArray = all_uses / np.maximum(all_held, 1e-9)
    return rates


def _best_from_each(rates: FloatArray) -> FloatArray:
    widths = np.append(np.diff(AGES_S), AGES_S[-1])
    best = np.zeros_like(rates)
    for start in range(len(AGES_S)):
        expected = rates[:, start:] * widths[start:]
        gone = np.cumsum(expected, axis=1)
        used = np.exp(expected - gone) - np.exp(-gone)
        held = np.where(expected > 1e-9, used / np.maximum(rates[:, start:], 1e-12), np.exp(-gone) * widths[start:])
        best[:, start] = (np.cumsum(used, axis=1) / np.cumsum(held, axis=1)).max(axis=1)
    return best


def _replay(endings: Sequence[Ending], worth: FloatArray, rooms: FloatArray, memory_bytes: int) -> float:
    """Tokens reused of the conversations' own, `worth` by end and age."""
    events = [(ending.time_s, 1, index) for index, ending in enumerate(endings)]
    events += [(e.time_s + e.gap_s, 0, index) for index, e in enumerate(endings) if e.gap_s < math.inf]
    kept: dict[int, None] = {}
    used_bytes = gained = 0.0
    for now, begins, index in sorted(events):
        if begins:
            kept[index] = None
            used_bytes += rooms[index]
        elif index in kept:
            del kept[index]
            used_bytes -= rooms[index]
            gained += endings[index].gain
        while used_bytes > memory_bytes:
            least = min(kept, key=lambda place: worth[place, age_bin(now - endings[place].time_s)])
            del kept[least]
            used_bytes -= rooms[least]
    return gained


def age_bin(age_s: float) -> int:
    return int(np.searchsorted(AGES_S, age_s + 1e-6, side="right")) - 1
