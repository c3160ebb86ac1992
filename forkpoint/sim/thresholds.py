"""What a policy without foresight could reach that knows all rates beforehand.

A conversation's end is kept until it is asked for, or until an age that depends on its class: how many turns came
before, and how long it is. The ages are the best for the very trace that they are judged on, running requests take no
room, and ends alone take any. It is an estimate for policies of this family, not a bound for all: a policy that knows
more than turns, lengths and ages may do better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from forkpoint.sim.shape import ModelShape
from forkpoint.sim.trace import Trace, TraceRequest

AGES_S: Final = (0, 5, 10, 20, 30, 45, 60, 75, 90, 105, 120, 150, 180, 240, 300, 420, 600, 900, 1800, 3600, 7200)
MANY_TURNS: Final = 5
NUM_PRICES: Final = 4000


def threshold_ceiling(trace: Trace, shape: ModelShape, memory_bytes: int) -> float:
    """Tokens that continued conversations reuse under the best ages; arrivals as in `Trace.by_arrival`."""
    arrivals = trace.arrival_times()
    ending = max(arrivals.values())
    classes: dict[tuple[int, int], list[tuple[float, int, int, float]]] = {}
    for turns in _sessions(trace, arrivals).values():
        for index, request in enumerate(turns):
            length = request.num_prompt_tokens + request.num_output_tokens
            arrival = arrivals[request.id]
            gap = arrivals[turns[index + 1].id] - arrival if index + 1 < len(turns) else math.inf
            room = shape.layout.slot_bytes + length * shape.kv_token_bytes
            key = min(index, MANY_TURNS), length.bit_length() // 2
            classes.setdefault(key, []).append((gap, length, room, ending - arrival))
    reused, held = [], []
    for entries in classes.values():
        gaps, lengths, rooms, left = np.asarray(entries).T
        reused.append([float(lengths[gaps <= age].sum()) for age in AGES_S])
        held.append([float((rooms * np.minimum(np.minimum(gaps, age), left)).sum()) for age in AGES_S])
    worth, use, budget = np.asarray(reused), np.asarray(held), memory_bytes * max(ending, 1e-9)
    if not use.any():
        return float(worth.max(axis=1).sum())
    highest = 1e3 * float(worth.max()) / float(use[use > 0].min())
    prices = np.concatenate([[0.0], np.geomspace(highest * 1e-12, highest, NUM_PRICES)])
    return min(float(price * budget + (worth - price * use).max(axis=1).sum()) for price in prices)


def _sessions(trace: Trace, arrivals: Mapping[str, float]) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in sorted(trace.requests, key=lambda item: arrivals[item.id]):
        sessions.setdefault(request.session, []).append(request)
    return sessions
