"""What a policy without foresight could reach that knows all rates beforehand.

A request's end is kept until a later one goes on from it, or until an age that depends on its class: how many turns
came before, and how long it is. The ages are the best for the very trace that they are judged on, running requests take
no room, memory that is free at one time may be used at another, and the prefix that conversations usually share is
always there. It is an estimate for policies of this family, not a bound for all: a policy that knows more than turns,
lengths and ages may do better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from forkpoint.sim.bound import BLOCK, ReuseProblem
from forkpoint.sim.shape import ModelShape
from forkpoint.sim.trace import Trace, TraceRequest

AGES_S: Final = (0, 5, 10, 20, 30, 45, 60, 75, 90, 105, 120, 150, 180, 240, 300, 420, 600, 900, 1800, 3600, 7200)
MANY_TURNS: Final = 5
NUM_PRICES: Final = 4000


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request. `gap_s` later another one goes on from it (infinity: none does) and reuses `gain` tokens
    beyond the shared prefix; `own_tokens` of its own are beyond that; `left_s` is the time until the trace ends."""

    turn: int
    num_tokens: int
    own_tokens: int
    gap_s: float
    gain: float
    left_s: float

    @property
    def known(self) -> tuple[int, int]:
        """The class that it belongs to: what is known of it when it ends."""
        return min(self.turn, MANY_TURNS), self.num_tokens.bit_length() // 2


def threshold_ceiling(trace: Trace, problem: ReuseProblem, shape: ModelShape, memory_bytes: int) -> float:
    """Tokens reused under the best ages; arrivals as in `Trace.by_arrival`, whose `problem` this is."""
    shared, endings = find_endings(trace, problem)
    classes: dict[tuple[int, int], list[Ending]] = {}
    for ending in endings:
        classes.setdefault(ending.known, []).append(ending)
    gained, held = [], []
    for members in classes.values():
        gaps = np.asarray([ending.gap_s for ending in members])
        gains = np.asarray([ending.gain for ending in members])
        left = np.asarray([ending.left_s for ending in members])
        rooms = shape.layout.slot_bytes + np.asarray([e.own_tokens for e in members]) * shape.kv_token_bytes
        gained.append([float(gains[gaps <= age].sum()) for age in AGES_S])
        held.append([float((rooms * np.minimum(np.minimum(gaps, age), left)).sum()) for age in AGES_S])
    worth, use = np.asarray(gained), np.asarray(held)
    if not use.any():
        return shared + float(worth.max(axis=1).sum())
    budget = memory_bytes * max(ending.left_s for ending in endings)
    highest = 1e3 * max(float(worth.max()), 1.0) / float(use[use > 0].min())
    prices = np.concatenate([[0.0], np.geomspace(highest * 1e-12, highest, NUM_PRICES)])
    return shared + min(float(price * budget + (worth - price * use).max(axis=1).sum()) for price in prices)


def find_endings(trace: Trace, problem: ReuseProblem) -> tuple[float, list[Ending]]:
    """(tokens reused of the prefix that conversations usually share, the ends of all requests)."""
    order, arrivals = trace.by_arrival(), trace.arrival_times()
    reusable = BLOCK * np.diff(problem.first)
    shared = _usual_share(order, reusable)
    times = [arrivals[request.id] for request in order]
    followers: list[list[int]] = [[] for _ in order]
    turns = [0] * len(order)
    for index in np.flatnonzero(reusable > shared).tolist():
        before = int(problem.last[problem.first[index + 1] - 1])
        followers[before].append(index)
        turns[index] = turns[before] + 1
    endings = []
    for index, request in enumerate(order):
        length = request.num_prompt_tokens + request.num_output_tokens
        own, since = max(length - shared, 0), times[index]
        for follower in followers[index]:
            gap_s, gain = times[follower] - since, float(reusable[follower] - shared)
            endings.append(Ending(turns[index], length, own, gap_s, gain, times[-1] - since))
            since = times[follower]
        if not followers[index]:
            endings.append(Ending(turns[index], length, own, math.inf, 0.0, times[-1] - since))
    return float(np.minimum(reusable, shared).sum()), endings


def _usual_share(order: Sequence[TraceRequest], reusable: npt.NDArray[np.int64]) -> int:
    """What the first turn of half of all sessions, or of more, finds at least."""
    first: dict[str, int] = {}
    for request, num_tokens in zip(order, reusable.tolist(), strict=True):
        first.setdefault(request.session, num_tokens)
    return sorted(first.values())[len(first) // 2]
