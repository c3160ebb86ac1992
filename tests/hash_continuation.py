"""The tokens that the hash runner's stand-in for a model puts out after given ones, with nothing cached."""

from __future__ import annotations

import numpy as np

from forkpoint.cache.layout import CacheLayout
from tests.rolling_hash import MASK, HashArray, RollingHash


class HashContinuation:
    """Computes one token after another. A caller may append other tokens than those that it computes."""

    def __init__(self, layout: CacheLayout, hasher: RollingHash, rolls: HashArray, num_tokens: int, seed: int) -> None:
        """`rolls[n]` is the hash after `n` tokens, of which the first `num_tokens` are known."""
        self._layout, self._hasher, self._seed = layout, hasher, seed
        hasher.reserve(num_tokens + 1)
        known = rolls[1 : num_tokens + 1]
        self._roll, self._history = int(rolls[num_tokens]), known.tolist()
        self._digest = int((known * hasher.weights[:num_tokens]).sum(dtype=np.uint64))

    def next_token(self) -> int:
        state = self._roll if self._layout.has_states else 0
        digest = self._digest if self._layout.has_kv else 0
        return self._hasher.next_token(state, (digest + self._of_windows()) & MASK, self._seed)

    def append(self, token: int) -> None:
        position = len(self._history)
        self._hasher.reserve(position + 2)
        self._roll = self._hasher.extend(self._roll, token)
        self._history.append(self._roll)
        self._digest = (self._digest + self._roll * int(self._hasher.weights[position])) & MASK

    def _of_windows(self) -> int:
        """What attention with windows adds to the hash."""
        total, position = 0, len(self._history)
        for group in self._layout.windows:
            assert group.window is not None
            first = max(0, position + 1 - group.window)
            own = np.asarray(self._history[first:], np.uint64) * self._hasher.weights[first:position]
            total += int(own.sum(dtype=np.uint64))
        return total
