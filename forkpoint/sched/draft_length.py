"""How many drafts pay: from measured step times, and from what became of each row's drafts."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_RATE = 0.7  # of drafts that are right, before anything is known of a row
RATE_MEMORY = 1 / 8  # weight of the newest draft
FIRST_PRICE = 0.1  # of one more token, as a share of a step of one token a row
TIME_MEMORY = 0.97  # weight of what was known before each step
SLOWEST = 4.0  # times the usual: what takes longer was held up by something else
MOST_WAIT = 64  # steps between two tries of a row whose drafts do not pay


class StepTimes:
    """A line through the durations of decode steps by their tokens, newer ones weighing more; and tokens a second."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # of 1, x, y, x x, x y for x tokens in y seconds, and of tokens confirmed

    def add(self, num_tokens: int, num_confirmed: int, elapsed_s: float) -> None:
        weight, _, y, *_ = self._sums
        if weight > 1:
            elapsed_s = min(elapsed_s, SLOWEST * y / weight)
        new = (1.0, num_tokens, elapsed_s, num_tokens**2, num_tokens * elapsed_s, num_confirmed)
        self._sums = [TIME_MEMORY * before + value for before, value in zip(self._sums, new, strict=True)]

    @property
    def price(self) -> float:
        """What one more token in a step costs, in tokens that the same time would confirm."""
        weight, x, y, xx, xy, confirmed = self._sums
        if not confirmed or not y:
            return 0.0
        spread = weight * xx - x**2
        if spread <= 1e-3 * weight**2:
            return FIRST_PRICE
        return max(0.0, (weight * xy - x * y) / spread) * confirmed / y


@dataclass(slots=True)
class _Row:
    rate: float = FIRST_RATE
    wait: int = 1  # steps until the next try, doubled by each as long as drafts do not pay
    next_try: int = 0  # step from which on a draft that does not seem to pay is tried; at once if the last was right


class DraftLength:
    """Decides how many drafts a row may have. Written by the Speculator.

    Rows whose drafts do not pay try one in the same steps, at multiples of how long they wait: a step with few drafts
    costs nearly as much as one in which every row has one.
    """

    def __init__(self) -> None:
        self._times, self._num_steps = StepTimes(), 0
        self._rows: dict[str, _Row] = {}

    def choose(self, name: str, most: int) -> int:
        """As many as are likelier right than what each costs; now and then one, to see whether that has changed."""
        row, price = self._rows.setdefault(name, _Row()), self._times.price
        likely, count = row.rate, 0
        while count < most and likely > price:
            count, likely = count + 1, likely * row.rate
        if count:
            row.wait = 1
        elif self._num_steps >= row.next_try:
            row.next_try = (self._num_steps // row.wait + 1) * row.wait
            row.wait = min(2 * row.wait, MOST_WAIT)
            return min(1, most)
        return count

    def tries(self, name: str) -> bool:
        """Whether `choose` would take drafts. Changes nothing."""
        row = self._rows.get(name, _Row())
        return row.rate > self._times.price or self._num_steps >= row.next_try

    def likely(self, name: str, count: int) -> float:
        """How likely it is that so many guesses are all right."""
        return self._rows.get(name, _Row()).rate ** count

    def judged(self, name: str, num_drafts: int, num_accepted: int) -> None:
        """What became of a row's drafts: those up to the first wrong one tell something."""
        row = self._rows.get(name)
        if row is None:  # it ended while they were in flight
            return
        for i in range(min(num_accepted + 1, num_drafts)):
            row.rate += RATE_MEMORY * ((i < num_accepted) - row.rate)
        if num_accepted == num_drafts:
            row.next_try = 0

    def stepped(self, num_tokens: int, num_confirmed: int, elapsed_s: float | None) -> None:
        self._num_steps += 1
        if elapsed_s is not None:
            self._times.add(num_tokens, num_confirmed, elapsed_s)

    def forget(self, name: str) -> None:
        self._rows.pop(name, None)
