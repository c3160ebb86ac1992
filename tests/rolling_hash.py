"""Rolling hashes of token sequences, vectorised over tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HashArray = npt.NDArray[np.uint64]

MASK = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 2**64)
_EMPTY = 0x243F6A8885A308D3


def mix(value: int) -> int:
    """splitmix64's finaliser."""
    value = (value + _BASE) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _powers(base: int, count: int) -> HashArray:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


class RollingHash:
    """Rolling hashes: `roll(n + 1) = roll(n) * BASE + mix(token)` modulo 2**64, many tokens at a time."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokens = np.array([mix(token) for token in range(vocab_size)], np.uint64)
        self._up, self._down = _powers(_BASE, 0), _powers(_BASE_INVERSE, 0)
        self.weights = np.empty(0, np.uint64)

    def reserve(self, num_tokens: int) -> None:
        if num_tokens >= len(self._up):
            size = 2 * num_tokens + 64
            self._up, self._down = _powers(_BASE, size), _powers(_BASE_INVERSE, size)
            self.weights = np.arange(size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

    def rolls(self, tokens: npt.NDArray[np.int32]) -> HashArray:
        """`[n + 1]`: the hash after 0, 1, .. n tokens."""
        self.reserve(len(tokens) + 1)
        out = np.empty(len(tokens) + 1, np.uint64)
        out[0] = _EMPTY
        scaled = self._tokens[tokens] * self._down[1 : len(tokens) + 1]
        out[1:] = (np.cumsum(scaled, dtype=np.uint64) + np.uint64(_EMPTY)) * self._up[1 : len(tokens) + 1]
        return out

    def extend(self, roll: int, token: int) -> int:
        return (roll * _BASE + int(self._tokens[token])) & MASK

    def next_token(self, state: int, digest: int, seed: int) -> int:
        return mix(state ^ mix(digest ^ mix(seed))) % self.vocab_size
