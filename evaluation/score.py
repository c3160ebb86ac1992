"""Exact match, counted by task and by distance, with the interval that the count allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from forkpoint.errors import ConfigError

Z_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Count:
    """`num_right` of `num` answers."""

    num_right: int = 0
    num: int = 0

    @property
    def accuracy(self) -> float:
        """The share of right answers; nan if there are no answers."""
        return self.num_right / self.num if self.num else float("nan")

    def interval(self, z: float = Z_95) -> tuple[float, float]:
        """Return Wilson's interval of the true share, by default at 95 %; (0, 1) if there are no answers."""
        if not self.num:
            return 0.0, 1.0
        share, spread = self.accuracy, z * z / self.num
        middle = (share + spread / 2) / (1 + spread)
        half = z / (1 + spread) * sqrt(share * (1 - share) / self.num + spread / (4 * self.num))
        return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))

    def __add__(self, other: Count) -> Count:
        return Count(self.num_right + other.num_right, self.num + other.num)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.num_right} of {self.num} ({self.accuracy:.1%}, 95 % interval {low:.1%} to {high:.1%})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one example."""

    task: str
    distance: str
    right: bool


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over a suite. The keys of `cells` are (task, distance)."""

    total: Count
    tasks: dict[str, Count]
    distances: dict[str, Count]
    cells: dict[tuple[str, str], Count]


def is_right(text: str, answer: str) -> bool:
    """Return whether both are equal, apart from surrounding white space."""
    return text.strip() == answer.strip()


def score(verdicts: Iterable[Verdict]) -> Score:
    """Count all verdicts, with keys in the order of their first occurrence. Raises ConfigError if there are none."""
    total = Count()
    tasks: dict[str, Count] = {}
    distances: dict[str, Count] = {}
    cells: dict[tuple[str, str], Count] = {}
    for verdict in verdicts:
        one = Count(int(verdict.right), 1)
        total += one
        tasks[verdict.task] = tasks.get(verdict.task, Count()) + one
        distances[verdict.distance] = distances.get(verdict.distance, Count()) + one
        cell = verdict.task, verdict.distance
        cells[cell] = cells.get(cell, Count()) + one
    if not total.num:
        raise ConfigError("nothing to score: there are no answers")
    return Score(total, tasks, distances, cells)
