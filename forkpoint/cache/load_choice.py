"""Whether a prefix is loaded from a tier or computed: whichever takes less time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forkpoint.cache.eviction import RecomputeCost

ASSUMED_RATE: Final = 10e9  # bytes per second, before a load was timed
LEAST_BYTES: Final = 8 * 2**20  # loads of fewer bytes are not timed: they say little about the rate
LEAST_TOKENS: Final = 1024  # steps of fewer prompt tokens are not timed: they say little about the rate
NUM_RATES: Final = 8  # number of timed loads; the fastest counts, because steps delay the others
NUM_STEPS: Final = 8  # number of timed steps after which the weight of earlier ones is halved
TRY_AGAIN_S: Final = 60.0  # seconds after which a tier that was too slow is timed again
LATE_FACTOR: Final = 2.0  # factor on the estimated time of a read, after which it is late
SLACK_S: Final = 0.25  # seconds added to that: a copy may have to wait for a step
BUSY_FACTOR: Final = 4.0  # a load may be slower than computing by this factor if it leaves the device to other requests
PATIENCE: Final = 0.02  # share of the time of computing for which a load goes on before it is judged


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load has come after `elapsed_s`.

    `arrived_bytes` have arrived, and `awaited_bytes` may arrive next, at any moment. `rest_bytes` come after these.
    """

    elapsed_s: float
    arrived_bytes: int
    awaited_bytes: int
    rest_bytes: int


class LoadChoice:
    """Times loads from a tier and steps that compute prompts. Without measurements a load is expected to pay."""

    def __init__(self, cost: RecomputeCost, clock: Callable[[], float]) -> None:
        self._cost, self._clock = cost, clock
        self._rates = deque[float](maxlen=NUM_RATES)  # bytes per second
        self._loaded_s = 0.0  # when the last one was measured
        self._closed_until_s = -math.inf
        self._computed_cost = self._computed_s = self._num_steps = 0.0

    def pays(self, num_bytes: int, start: int, end: int, *, is_busy: bool) -> bool:
        """Return whether loading `num_bytes` takes less time than computing tokens `[start, end)`.

        If other requests run (`is_busy`), a load may take BUSY_FACTOR times as long. False while `is_closed`, and
        otherwise True without measurements.
        """
        if not self.has_rate:
            self._rates.clear()
        if self.is_closed:
            return False
        if not self._rates or not self._computed_s:
            return True
        factor = BUSY_FACTOR if is_busy else 1.0
        return num_bytes / max(self._rates) < factor * self._computing_s(start, end)

    def _computing_s(self, start: int, end: int) -> float:
        return self._cost(start, end) * self._computed_s / self._computed_cost

    def goes_on(self, progress: LoadProgress, start: int, end: int) -> bool:
        """Return whether to go on with a load rather than to compute tokens `[start, end)` after all.

        No other requests may run: their steps delay the reports of what has arrived. Before LEAST_BYTES have arrived, a
        load is given up only if it is slower than computing even if `awaited_bytes` arrive now. The rate of a load that
        is given up counts as a measured one.
        """
        if not self._computed_s or not progress.rest_bytes:
            return True
        computing_s = self._computing_s(start, end)
        if progress.elapsed_s < PATIENCE * computing_s:
            return True
        arrived, rest = progress.arrived_bytes, progress.rest_bytes
        if arrived < LEAST_BYTES and not progress.awaited_bytes:
            return True  # the time of planning may have been longer than that of the load
        if arrived < LEAST_BYTES:
            arrived += progress.awaited_bytes
        else:
            rest += progress.awaited_bytes
        rate = arrived / progress.elapsed_s
        if rest < rate * computing_s:
            return True
        self._note_rate(rate)
        return False

    @property
    def has_rate(self) -> bool:
        """Whether a load was timed in the last TRY_AGAIN_S."""
        return bool(self._rates) and self._clock() - self._loaded_s <= TRY_AGAIN_S

    @property
    def is_closed(self) -> bool:
        """Whether a read was late in the last TRY_AGAIN_S."""
        return self._clock() < self._closed_until_s

    def is_late(self, num_bytes: int, waited_s: float) -> bool:
        """Return whether a read of at most `num_bytes` is late. From then on loads do not pay, for TRY_AGAIN_S."""
        expected_s = num_bytes / max(self._rates, default=ASSUMED_RATE)
        if waited_s <= SLACK_S + LATE_FACTOR * expected_s:
            return False
        self._closed_until_s = self._clock() + TRY_AGAIN_S
        return True

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """Take in that `num_bytes` arrived in `seconds`. Ignores loads of less than LEAST_BYTES."""
        if num_bytes >= LEAST_BYTES and seconds > 0:
            self._note_rate(num_bytes / seconds)

    def _note_rate(self, rate: float) -> None:
        self._rates.append(rate)
        self._loaded_s = self._clock()

    def note_step(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Take in a step that computed prompts: its tokens, and its pairs of a query and a key.

        Ignores steps of less than LEAST_TOKENS.
        """
        if num_tokens < LEAST_TOKENS:
            return
        if self._num_steps >= NUM_STEPS:
            self._computed_cost, self._computed_s = self._computed_cost / 2, self._computed_s / 2
            self._num_steps /= 2
        self._computed_cost += num_tokens * self._cost.per_token + num_pairs * self._cost.per_pair
        self._computed_s += seconds
        self._num_steps += 1
