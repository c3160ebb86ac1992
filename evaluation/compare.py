"""Paired comparisons of the same questions, answered twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evaluation.subject import Reply

SIGNIFICANCE = 0.05
Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class PairedAccuracy:
    """Results of `num` questions. `lost` of them were right before and are wrong now; `gained` were wrong and are right
    now."""

    num: int
    lost: int
    gained: int

    @classmethod
    def of(cls, before: Sequence[bool], now: Sequence[bool]) -> PairedAccuracy:
        pairs = list(zip(before, now, strict=True))
        return cls(len(pairs), pairs.count((True, False)), pairs.count((False, True)))

    @property
    def difference(self) -> float:
        return (self.gained - self.lost) / self.num if self.num else 0.0

    @property
    def half_width(self) -> float:
        """Half of the difference's 95 % interval, computed from the questions that changed."""
        if not self.num:
            return 0.0
        spread = self.lost + self.gained - (self.gained - self.lost) ** 2 / self.num
        return Z_95 * math.sqrt(spread) / self.num

    @property
    def p_value(self) -> float:
        """The p-value of McNemar's exact test: the probability that chance splits the changed questions at least as
        unevenly."""
        changed = self.lost + self.gained
        tail = sum(math.comb(changed, k) for k in range(min(self.lost, self.gained) + 1))
        return min(1.0, 2.0 * tail / 2.0**changed)

    @property
    def is_noise(self) -> bool:
        return self.p_value >= SIGNIFICANCE


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison of `num` answers, of which `num_identical` have the same tokens.

    `largest_change` is the largest change of a token's log-probability (nats), up to the first different token of two
    answers. `is_exact`: tokens and log-probabilities are equal to the last bit.
    """

    num: int
    num_identical: int
    largest_change: float
    is_exact: bool

    @classmethod
    def of(cls, before: Sequence[Reply], now: Sequence[Reply]) -> Agreement:
        pairs = list(zip(before, now, strict=True))
        same = [a.token_ids == b.token_ids for a, b in pairs]
        exact = all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs)
        return cls(len(pairs), sum(same), max((_largest_change(a, b) for a, b in pairs), default=0.0), exact)


def _largest_change(a: Reply, b: Reply) -> float:
    return max(map(abs, _changes(a, b)), default=0.0)


def _changes(a: Reply, b: Reply) -> Iterator[float]:
    """Yield the changes of the log-probabilities (nats) of tokens that both sampled after the same tokens."""
    for index, (token, other) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if token != other:
            return
        yield b.logprobs[index] - a.logprobs[index]


def root_mean_square_change(before: Sequence[Reply], now: Sequence[Reply]) -> float:
    """Return the root mean square change of the log-probabilities (nats) of tokens that both sampled after the same
    tokens; 0 if there are none."""
    changes = [change for a, b in zip(before, now, strict=True) for change in _changes(a, b)]
    return math.sqrt(math.fsum(change * change for change in changes) / len(changes)) if changes else 0.0


@dataclass(frozen=True, slots=True)
class PairedMean:
    """The mean of paired differences, and its Student's t (0 if all differences are 0)."""

    num: int
    mean: float
    t: float

    @classmethod
    def of(cls, before: Sequence[float], now: Sequence[float]) -> PairedMean:
        changes = [b - a for a, b in zip(before, now, strict=True)]
        count = len(changes)
        mean = math.fsum(changes) / count if count else 0.0
        if count < 2:
            return cls(count, mean, 0.0)
        variance = math.fsum((change - mean) ** 2 for change in changes) / (count - 1)
        error = math.sqrt(variance / count)
        return cls(count, mean, mean / error if error else math.copysign(math.inf, mean) if mean else 0.0)
