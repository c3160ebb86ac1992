"""What an ideal cache reaches that knows how likely conversations are to go on, and when, but not which ones do.

It keeps the ends of requests: their keys and values with the states at the ends, as a whole or not at all, and the
states inside the prompt, which may go before. Where states lie is the same for all, of several choices the one that
reaches most. A conversation that comes back goes on from the deepest state before the place where it parts from what
was said. Running requests take their room; the prefix that conversations usually share takes none. What gives way is
worth least: the uses expected for the time held, up to the best age to give it up at, for the tokens saved and the
bytes taken. What an end shares with a request that went on from it is counted twice if another is still to come.

Chances are those of the classes that the engine's own policy tells apart (`cache/reuse.py`): whether a tool or a person
answers next, the number of the turn and its size, by age. Those of one half of the sessions are learnt from the whole
other half, so that no conversation is judged by its own outcome; the result is the mean over several ways to halve
them. It is an estimate for policies of this family, not a
bound for all: one that knows more, or that chooses for each conversation what of it to keep, may do better.
"""

from __future__ import annotations

import enum
import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from forkpoint.cache.reuse import MOST_USES, NUM_SIZES, ReuseClass, ReuseKind
from forkpoint.sim.bound import BLOCK, FloatArray
from forkpoint.sim.endings import Ending, History, Visit
from forkpoint.sim.shape import ModelShape

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_AGES_S: Final = (0, 10, 20, 30, 45, 60, 75, 90, 105, 120, 150, 180, 240, 300, 420, 600, 900, 1800, 3600, 7200)
AGES_S: Final = np.asarray(_AGES_S, np.float64)  # bin k is [AGES_S[k], AGES_S[k + 1]), the last one without end
_WIDTHS_S: Final = np.append(np.diff(AGES_S), AGES_S[-1])
ROUNDING_S: Final = 1e-6  # an age this close to an edge is beyond it
ASSUMED_ENDS: Final = 2.0  # a kind is taken to go on as all do until about so many of its ends were seen
ASSUMED_USES: Final = 2.0  # the same of numbers and sizes of turns, in uses
NUM_SPLITS: Final = 4  # ways to halve the sessions
NUM_ROUNDS: Final = 4  # in which the factors by number and by size are fitted to each other


@dataclass(frozen=True, slots=True)
class StateSet:
    """Where states are kept: at the ends of a request's prompt and output; inside its prompt where it declares them,
    one block before the end, and every `step` tokens (0: none)."""

    prompt_end: bool = False
    output_end: bool = False
    near_end: bool = False
    step: int = 0

    def ends(self, visit: Visit, beyond: int) -> list[int]:
        """Tokens after which there is a state at an end, ascending, those after `beyond` only."""
        prompt, places = visit.request.num_prompt_tokens, set()
        if self.prompt_end:
            places |= {(prompt - 1) // BLOCK * BLOCK, prompt // BLOCK * BLOCK}
        if self.output_end:
            places.add((prompt + visit.request.num_output_tokens - 1) // BLOCK * BLOCK)
        return sorted(place for place in places if place > beyond)

    def inside(self, visit: Visit, beyond: int) -> list[int]:
        """The same inside the prompt."""
        usable = (visit.request.num_prompt_tokens - 1) // BLOCK * BLOCK
        places = {point // BLOCK * BLOCK for point in visit.request.breakpoints if point <= usable}
        if self.near_end:
            places.add(usable - BLOCK)
        if self.step:
            places.update(range(self.step, usable - self.step // 2, self.step))
        return sorted(place for place in places if place > beyond)


_SPARSE_STEPS: Final = (0, 32768, 16384, 8192)
STATE_SETS: Final = (
    StateSet(prompt_end=True),
    StateSet(output_end=True),
    StateSet(prompt_end=True, output_end=True),
    *(StateSet(prompt_end=True, near_end=True, step=step) for step in _SPARSE_STEPS),
    *(StateSet(prompt_end=True, output_end=True, near_end=True, step=step) for step in _SPARSE_STEPS),
)


def known_chances(history: History, shape: ModelShape, memory_bytes: int) -> float:
    """Tokens reused, with the set of states that reaches most: the mean over the ways to halve the sessions."""
    shared = sum(min(visit.reusable, history.shared) for visit in history.visits)
    most = []
    for split in range(NUM_SPLITS):
        expected = expected_uses(history, split)
        most.append(max(_Replay(history, shape, states, expected).run(memory_bytes) for states in STATE_SETS))
    return shared + float(np.mean(most))


def expected_uses(history: History, split: int = 0) -> FloatArray:
    """`[endings, ages]`: from each age on, the most uses for every second held, over the ages to give it up at.
    `split` says how the sessions are halved."""
    seen = _Seen.of(history, split)
    best = np.zeros_like(seen.uses)
    for side in (0, 1):
        learnt = seen.pick(seen.half != side)
        for awaits_tool in (False, True):
            judged = (seen.half == side) & (seen.awaits_tool == awaits_tool)
            if judged.any():
                best[judged] = _best_from_each(learnt.rates_of(seen.pick(judged), awaits_tool))
    return best


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of endings, `[endings]`, and what became of them by age, `[endings, ages]`."""

    half: IntArray
    awaits_tool: BoolArray
    number: IntArray
    size: IntArray
    uses: FloatArray
    held: FloatArray  # seconds at risk

    @classmethod
    def of(cls, history: History, split: int) -> _Seen:
        endings, visits = history.endings, history.visits
        sessions = list(dict.fromkeys(visit.request.session for visit in visits))
        random.Random(split).shuffle(sessions)
        halves = {session: place % 2 for place, session in enumerate(sessions)}
        classes = [ReuseClass.of_conversation(visits[ending.visit].turn) for ending in endings]
        uses, held = np.zeros((len(endings), len(AGES_S))), np.zeros((len(endings), len(AGES_S)))
        widths = np.append(_WIDTHS_S[:-1], np.inf)
        for index, ending in enumerate(endings):
            held[index] = np.clip(min(ending.gap_s, ending.left_s) - AGES_S, 0, widths)
            if ending.gap_s < math.inf:
                uses[index, age_bin(ending.gap_s)] = 1
        return cls(
            np.asarray([halves[visits[ending.visit].request.session] for ending in endings]),
            np.asarray([found.kind is ReuseKind.TOOL_CALL for found in classes]),
            np.asarray([min(found.num_uses, MOST_USES) for found in classes]),
            np.asarray([found.size for found in classes]),
            uses,
            held,
        )

    def pick(self, which: BoolArray) -> _Seen:
        return _Seen(
            self.half[which],
            self.awaits_tool[which],
            self.number[which],
            self.size[which],
            self.uses[which],
            self.held[which],
        )

    def rates_of(self, judged: _Seen, awaits_tool: bool) -> FloatArray:
        """Uses a second, by ending and age, of endings of one kind: the rate of the kind by age, times a factor by the
        number of the turn and one by its size."""
        kind = self.pick(self.awaits_tool == awaits_tool)
        by_age = self.uses.sum(axis=0) / np.maximum(self.held.sum(axis=0), 1e-9)
        survived = np.exp(-np.cumsum(np.append(0, by_age[:-1] * _WIDTHS_S[:-1])))
        assumed_held = ASSUMED_ENDS * survived * _WIDTHS_S
        by_age = (kind.uses.sum(axis=0) + assumed_held * by_age) / (kind.held.sum(axis=0) + assumed_held)
        by_number, by_size = np.ones(MOST_USES + 1), np.ones(NUM_SIZES)
        expected = kind.held @ by_age
        for _ in range(NUM_ROUNDS):
            by_number = kind.factors(kind.number, expected * by_size[kind.size], MOST_USES + 1)
            by_size = kind.factors(kind.size, expected * by_number[kind.number], NUM_SIZES)
        rates: FloatArray = (by_number[judged.number] * by_size[judged.size])[:, None] * by_age
        return rates

    def factors(self, classes: IntArray, expected: FloatArray, num_classes: int) -> FloatArray:
        """Uses seen over uses expected, by class."""
        uses = np.bincount(classes, self.uses.sum(axis=1), num_classes)
        factors: FloatArray = (uses + ASSUMED_USES) / (np.bincount(classes, expected, num_classes) + ASSUMED_USES)
        return factors


def _best_from_each(rates: FloatArray) -> FloatArray:
    best = np.zeros_like(rates)
    for start in range(len(AGES_S)):
        expected = rates[:, start:] * _WIDTHS_S[start:]
        gone = np.cumsum(expected, axis=1)
        used = np.exp(expected - gone) - np.exp(-gone)
        held = np.where(expected > 1e-9, used / np.maximum(rates[:, start:], 1e-12), np.exp(-gone) * _WIDTHS_S[start:])
        best[:, start] = (np.cumsum(used, axis=1) / np.cumsum(held, axis=1)).max(axis=1)
    return best


class _Event(enum.IntEnum):
    """What happens, in this order where the time is the same."""

    LEAVES = 0  # a visit ends
    USED = 1  # an ending
    BEGINS = 2  # an ending's wait
    ARRIVES = 3  # a visit
    USED_AT_ONCE = 4  # an ending that waited for nobody


class _Replay:
    """The ideal cache with one set of states: what it reuses of the conversations' own tokens.

    An ending has two parts, which are rows 0 and 1 of the arrays `[2, endings]`: its keys and values with the states
    at its ends, and the states inside, which go with the first part if not before it.
    """

    def __init__(self, history: History, shape: ModelShape, states: StateSet, expected: FloatArray) -> None:
        visits, endings, slot_bytes = history.visits, history.endings, shape.layout.slot_bytes
        ends = [states.ends(visit, history.shared) for visit in visits]
        inside = [states.inside(visit, history.shared) for visit in visits]
        of = np.asarray([ending.visit for ending in endings])
        own = np.asarray([visit.own_tokens for visit in visits], np.float64)
        num_ends, num_inside = (np.asarray([len(found) for found in places]) for places in (ends, inside))
        self._running = own * shape.kv_token_bytes + slot_bytes
        self._rooms = np.stack([own * shape.kv_token_bytes + num_ends * slot_bytes, num_inside * slot_bytes])[:, of]
        least = np.asarray([_gain(history, ending, ends[ending.visit]) for ending in endings], np.float64)
        most = [_gain(history, ending, sorted({*ends[ending.visit], *inside[ending.visit]})) for ending in endings]
        self._gains = np.stack([least, most - least])
        used = np.asarray([ending.follower is not None for ending in endings])
        share = self._gains[1, used].sum() / max(own[of[used]].sum(), 1)  # of a use, what the states inside serve
        saved = np.outer([1 - share, share], np.where(num_ends + num_inside > 0, own, 0)[of])
        self._worth = (saved / np.maximum(self._rooms, 1))[..., None] * expected
        self._since_s = np.asarray([ending.since_s for ending in endings])
        self._events = sorted(_events(history))

    def run(self, memory_bytes: int) -> float:
        """Tokens reused."""
        kept = np.zeros(self._rooms.shape, np.bool_)
        used_bytes = gained = 0.0
        for now, what, index in self._events:
            match what:
                case _Event.ARRIVES:
                    used_bytes += self._running[index]
                case _Event.LEAVES:
                    used_bytes -= self._running[index]
                case _Event.BEGINS:
                    kept[:, index] = True
                    used_bytes += self._rooms[:, index].sum()
                case _Event.USED:
                    gained += self._gains[kept[:, index], index].sum()
                    used_bytes -= self._rooms[kept[:, index], index].sum()
                    kept[:, index] = False
                case _Event.USED_AT_ONCE:
                    gained += self._gains[:, index].sum()
            while used_bytes > memory_bytes and kept.any():
                part, least = self._least(kept, now)
                gone = kept[part:, least]
                used_bytes -= self._rooms[part:, least][gone].sum()
                gone[:] = False
        return float(gained)

    def _least(self, kept: BoolArray, now: float) -> tuple[int, int]:
        """(part, ending) of the least worth among those that are kept."""
        parts, endings = np.nonzero(kept)
        ages = np.searchsorted(AGES_S, now - self._since_s[endings] + ROUNDING_S, side="right") - 1
        place = int(np.argmin(self._worth[parts, endings, ages]))
        return int(parts[place]), int(endings[place])


def _events(history: History) -> list[tuple[float, _Event, int]]:
    """(when, what, which visit or ending)."""
    events: list[tuple[float, _Event, int]] = []
    for index, visit in enumerate(history.visits):
        events += [(visit.stay.arrival_s, _Event.ARRIVES, index), (visit.stay.end_s, _Event.LEAVES, index)]
    for index, ending in enumerate(history.endings):
        if ending.gap_s <= 0:
            events.append((ending.since_s, _Event.USED_AT_ONCE, index))
            continue
        events.append((ending.since_s, _Event.BEGINS, index))
        if ending.gap_s < math.inf:
            events.append((ending.since_s + ending.gap_s, _Event.USED, index))
    return events


def _gain(history: History, ending: Ending, places: list[int]) -> int:
    """What the request that goes on from an ending reuses beyond what conversations usually share."""
    if ending.follower is None:
        return 0
    found = bisect_right(places, history.visits[ending.follower].reusable)
    return places[found - 1] - history.shared if found else 0


def age_bin(age_s: float) -> int:
    return int(np.searchsorted(AGES_S, age_s + ROUNDING_S, side="right")) - 1
