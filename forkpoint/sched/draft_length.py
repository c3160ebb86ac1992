"""How many drafts pay, from measured step times and from the acceptance rates of drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forkpoint.sched.step_line import StepLine

FIRST_RATE = 0.7  # acceptance rate that is assumed before any draft was judged
FIRST_WEIGHT, MOST_WEIGHT = 8, 256  # the global acceptance rate is a running mean over 8 drafts at first, then 256
ROW_MEMORY = 1 / 24  # weight of the newest draft in a row's deviation from the global rate
LEAST_DEVIATION = 0.2  # smaller ones count as chance: rows with equally many drafts fill a recorded step better
TIME_MEMORY = 0.97  # factor on the weight of earlier steps for each new step
# Longer steps were held up: clip a duration to 1.5 times the fitted line, or 4 times the mean before there is a line.
SLOWEST, FIRST_SLOWEST = 1.5, 4.0
MOST_STEPS_WITHOUT_FIT = 512  # steps for which a slope is kept without a new fit
MOST_WAIT = 64  # steps, at most, between two tries of a row whose drafts do not pay


class StepTimes:
    """Estimates the cost of one more token, from a line through the seconds of decode steps and their throughput."""

    def __init__(self) -> None:
        self._line = StepLine(TIME_MEMORY, MOST_STEPS_WITHOUT_FIT)
        self._confirmed = 0.0  # tokens: a sum with the line's weights

    def add(self, num_tokens: int, num_confirmed: int, elapsed_s: float) -> None:
        line = self._line
        if line.weight > 1 and line.slope is None:
            elapsed_s = min(elapsed_s, FIRST_SLOWEST * line.seconds / line.weight)
        elif line.slope is not None:
            expected = line.seconds + line.slope * (line.weight * num_tokens - line.num_tokens)
            elapsed_s = min(elapsed_s, SLOWEST * max(expected, line.seconds / 2) / line.weight)
        line.add(num_tokens, elapsed_s)
        self._confirmed = TIME_MEMORY * self._confirmed + num_confirmed

    @property
    def price(self) -> float | None:
        """The confirmed tokens that one more token in a step must bring to pay for its time; None: not known yet.

        Steps with more and with fewer tokens are needed to find it. It is 0 before the first step.
        """
        line = self._line
        if not self._confirmed or not line.seconds:
            return 0.0
        return None if line.slope is None else line.slope * self._confirmed / line.seconds


@dataclass(slots=True)
class _Row:
    deviation: float = 0.0  # the row's acceptance rate minus the global one
    wait: int = 1  # steps until the next try; each try doubles it as long as drafts do not pay
    next_try: int = 0  # step of the next try of a draft that does not seem to pay


class DraftLength:
    """Decides how many drafts a row may have; rows go by their request's id. The Speculator writes it.

    Acceptance rates are those of a row's i-th draft if the drafts before it are accepted. A row has too few drafts for
    rates of its own: its rate is the global one of i-th drafts plus the row's deviation. Rows whose drafts do not pay
    try one now and then. All of them try in the same steps, because few drafts cost a step nearly as much as many.
    """

    def __init__(self) -> None:
        self._times, self._num_steps = StepTimes(), 0
        self._rows: dict[str, _Row] = {}
        self._rates: list[float] = []  # global acceptance rate of the i-th drafts
        self._weights: list[int] = []

    def choose(self, name: str, most: int) -> int:
        """Return how many drafts, at most `most`, the row gets: as long as each is likely enough to pay for its time.

        A row whose drafts do not pay gets one now and then, to notice a change; then its next try is scheduled. While
        the cost is unknown, steps with `most` drafts and with half of them alternate.
        """
        row, price = self._rows.setdefault(name, _Row()), self._times.price
        if price is None:
            return most if self._num_steps % 2 else most // 2
        likely, count = self._rate(row, 0), 0
        while count < most and likely > price:
            count += 1
            likely *= self._rate(row, count)
        if count:
            row.wait = 1
        elif self._num_steps >= row.next_try:
            row.next_try = (self._num_steps // row.wait + 1) * row.wait
            row.wait = min(2 * row.wait, MOST_WAIT)
            return min(1, most)
        return count

    def tries(self, name: str) -> bool:
        """Return whether `choose` could return drafts now. Changes nothing."""
        row, price = self._rows.get(name, _Row()), self._times.price
        return price is None or self._rate(row, 0) > price or self._num_steps >= row.next_try

    def likely(self, name: str, count: int) -> float:
        """Return the probability that the row's first `count` drafts are all accepted."""
        row = self._rows.get(name, _Row())
        return math.prod(self._rate(row, i) for i in range(count))

    def judged(self, name: str, num_drafts: int, num_accepted: int) -> None:
        """Count the outcome of a row's drafts. Drafts after the first rejected one say nothing.

        A row that has ended is ignored. If all were accepted, the row may try again at once.
        """
        row = self._rows.get(name)
        if row is None:  # it ended while they were in flight
            return
        for i in range(min(num_accepted + 1, num_drafts)):
            if i == len(self._rates):
                self._rates.append(self._rates[-1] if i else FIRST_RATE)
                self._weights.append(FIRST_WEIGHT)
            error = (i < num_accepted) - self._rates[i]
            row.deviation += ROW_MEMORY * (error - row.deviation)
            self._weights[i] = min(self._weights[i] + 1, MOST_WEIGHT)
            self._rates[i] += error / self._weights[i]
        if num_accepted == num_drafts:
            row.next_try = 0

    def _rate(self, row: _Row, i: int) -> float:
        """Return the acceptance rate of the row's i-th draft if the drafts before it are accepted."""
        usual = self._rates[min(i, len(self._rates) - 1)] if self._rates else FIRST_RATE
        return min(1.0, max(0.0, usual + row.deviation * (abs(row.deviation) > LEAST_DEVIATION)))

    def stepped(self, num_tokens: int, num_confirmed: int, elapsed_s: float | None) -> None:
        self._num_steps += 1
        if elapsed_s is not None:
            self._times.add(num_tokens, num_confirmed, elapsed_s)

    def forget(self, name: str) -> None:
        self._rows.pop(name, None)
