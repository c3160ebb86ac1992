"""Token sequences of traces, as runs of invented ids: traces say which tokens are equal, not what they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from forkpoint.cache.hashing import TokenIds


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """Token ids as runs `(first id, length)`. A 100,000-token prompt takes a few runs."""

    runs: tuple[tuple[int, int], ...] = ()
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(length for _, length in self.runs))

    @classmethod
    def join(cls, parts: Iterable[TokenSpans]) -> TokenSpans:
        """Concatenate the parts. Runs that continue each other become one."""
        kept = [part for part in parts if part.num_tokens]
        if len(kept) == 1:
            return kept[0]
        runs: list[tuple[int, int]] = []
        for part in kept:
            for first, length in part.runs:
                if runs and runs[-1][0] + runs[-1][1] == first:
                    runs[-1] = (runs[-1][0], runs[-1][1] + length)
                elif length:
                    runs.append((first, length))
        return cls(tuple(runs))

    def part(self, start: int, end: int) -> TokenSpans:
        """Return tokens `[start, end)`, as far as the sequence has them."""
        if start <= 0 and end >= self.num_tokens:
            return self
        runs: list[tuple[int, int]] = []
        position = 0
        for first, length in self.runs:
            low, high = max(start - position, 0), min(end - position, length)
            if low < high:
                runs.append((first + low, high - low))
            position += length
            if position >= end:
                break
        return TokenSpans(tuple(runs))

    def array(self) -> TokenIds:
        """Return the ids, int32 `[num_tokens]`."""
        if not self.runs:
            return np.empty(0, np.int32)
        return np.concatenate([np.arange(first, first + length, dtype=np.int32) for first, length in self.runs])


@dataclass(slots=True)
class TokenMint:
    """Creates unique token ids."""

    next_id: int = 0

    def fresh(self, count: int) -> TokenSpans:
        """Return `count` ids that were not returned before. Raises OverflowError beyond int32."""
        first = self.next_id
        self.next_id += count
        if self.next_id >= 2**31:
            raise OverflowError(f"{self.next_id} distinct tokens do not fit int32; take fewer or shorter requests")
        return TokenSpans(((first, count),))
