"""How many drafts pay: from measured step times, and from what became of each row's drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_RATE = 0.7  # of drafts that are right, before anything is known of them
FIRST_WEIGHT, MOST_WEIGHT = 8, 256  # drafts that what all rows' come to is the mean of, at first and later
ROW_MEMORY = 1 / 24  # weight of the newest draft in what a row's are apart from that
SAME = 0.2  # up to which that is chance: rows with as many drafts as others fill a recorded step
TIME_MEMORY = 0.97  # weight of what was known before each step
SLOWEST, FIRST_SLOWEST = 1.5, 4.0  # times what the line says, or before it the mean: what takes longer was held up
APART = 0.05  # deviation of steps' tokens, as a share of their mean, that says what one costs
STALE = 512  # steps for which it is then known
MOST_WAIT = 64  # steps between two tries of a row whose drafts do not pay


class StepTimes:
    """A line through the durations of decode steps by their tokens, newer ones weighing more; and tokens a second.

    The line's slope is kept for a while where steps go on with about as many tokens each, which says nothing of it.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # of 1, x, y, x x, x y for x tokens in y seconds, and of tokens confirmed
        self._slope: float | None = None
        self._age = 0

    def add(self, num_tokens: int, num_confirmed: int, elapsed_s: float) -> None:
        weight, x, y, *_ = self._sums
        if weight > 1 and self._slope is None:
            elapsed_s = min(elapsed_s, FIRST_SLOWEST * y / weight)
        elif self._slope is not None:
            line = y + self._slope * (weight * num_tokens - x)
            elapsed_s = min(elapsed_s, SLOWEST * max(line, y / 2) / weight)
        new = (1.0, num_tokens, elapsed_s, num_tokens**2, num_tokens * elapsed_s, num_confirmed)
        self._sums = [TIME_MEMORY * before + value for before, value in zip(self._sums, new, strict=True)]
        weight, x, y, xx, xy, _ = self._sums
        spread = weight * xx - x**2
        self._age += 1
        if spread > (APART * x) ** 2:
            self._slope, self._age = max(0.0, (weight * xy - x * y) / spread), 0
        elif self._age > STALE:
            self._slope = None

    @property
    def price(self) -> float | None:
        """What one more token in a step costs, in tokens that the same time would confirm; None: steps of more and
        fewer tokens would tell."""
        _, _, y, *_, confirmed = self._sums
        if not confirmed or not y:
            return 0.0
        return None if self._slope is None else self._slope * confirmed / y


@dataclass(slots=True)
class _Row:
    apart: float = 0.0  # from how often all rows' drafts are right
    wait: int = 1  # steps until the next try, doubled by each as long as drafts do not pay
    next_try: int = 0  # step from which on a draft that does not seem to pay is tried; at once if the last was right


class DraftLength:
    """Decides how many drafts a row may have. Written by the Speculator.

    How likely a row's i-th draft is right, if those before it are, follows from all rows' i-th drafts and from how the
    row's own fare beside others': those alone are too few. Rows whose drafts do not pay try one in the same steps, at
    multiples of how long they wait: a step with few drafts costs nearly as much as one in which every row has one.
    """

    def __init__(self) -> None:
        self._times, self._num_steps = StepTimes(), 0
        self._rows: dict[str, _Row] = {}
        self._rates: list[float] = []  # of the i-th drafts
        self._weights: list[int] = []

    def choose(self, name: str, most: int) -> int:
        """As many as are likelier right than what each costs; now and then one, to see whether that has changed. Where
        nobody knows what they cost, all rows have half of them and all in turns."""
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
        """Whether `choose` would take drafts. Changes nothing."""
        row, price = self._rows.get(name, _Row()), self._times.price
        return price is None or self._rate(row, 0) > price or self._num_steps >= row.next_try

    def likely(self, name: str, count: int) -> float:
        """How likely it is that so many guesses are all right."""
        row = self._rows.get(name, _Row())
        return math.prod(self._rate(row, i) for i in range(count))

    def judged(self, name: str, num_drafts: int, num_accepted: int) -> None:
        """What became of a row's drafts: those up to the first wrong one tell something."""
        row = self._rows.get(name)
        if row is None:  # it ended while they were in flight
            return
        for i in range(min(num_accepted + 1, num_drafts)):
            if i == len(self._rates):
                self._rates.append(self._rates[-1] if i else FIRST_RATE)
                self._weights.append(FIRST_WEIGHT)
            error = (i < num_accepted) - self._rates[i]
            row.apart += ROW_MEMORY * (error - row.apart)
            self._weights[i] = min(self._weights[i] + 1, MOST_WEIGHT)
            self._rates[i] += error / self._weights[i]
        if num_accepted == num_drafts:
            row.next_try = 0

    def _rate(self, row: _Row, i: int) -> float:
        """How likely the row's i-th draft is right, if those before it are."""
        usual = self._rates[min(i, len(self._rates) - 1)] if self._rates else FIRST_RATE
        return min(1.0, max(0.0, usual + row.apart * (abs(row.apart) > SAME)))

    def stepped(self, num_tokens: int, num_confirmed: int, elapsed_s: float | None) -> None:
        self._num_steps += 1
        if elapsed_s is not None:
            self._times.add(num_tokens, num_confirmed, elapsed_s)

    def forget(self, name: str) -> None:
        self._rows.pop(name, None)
