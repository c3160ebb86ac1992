"""A grammar for tests without a model: what may come next is a hash of all outputs before."""

from __future__ import annotations

from copy import copy

import numpy as np

from forkpoint.errors import StructuredOutputError
from forkpoint.sched.plan import IntArray, TokenMasks
from tests.rolling_hash import mix


class HashGrammar:
    """Allows four ids or fewer after each output; the output is whole after `length` of them."""

    is_free = False

    def __init__(self, vocab_size: int, length: int) -> None:
        self.length = length
        self._vocab_size = vocab_size
        self._left = length
        self._state = 0
        self.allowed = self._follow()

    @property
    def mask(self) -> IntArray | None:
        if not self._left:
            return None
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        for token in self.allowed:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits.view(np.int32)

    def copy(self) -> HashGrammar:
        return copy(self)

    def accept(self, token_id: int) -> None:
        if token_id not in self.allowed or not self._left:
            raise StructuredOutputError(f"{token_id} may not come after {self._state}; allowed are {self.allowed}")
        self._left -= 1
        self._state = mix(self._state ^ mix(token_id))
        self.allowed = self._follow()

    def _follow(self) -> list[int]:
        return sorted({mix(self._state + i) % self._vocab_size for i in range(4)})


def allowed_ids(masks: TokenMasks | None) -> dict[int, list[int]]:
    """Return the allowed ids of each masked position, keyed by its index among the sampled ones."""
    if masks is None:
        return {}
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    return {row: np.flatnonzero(own).tolist() for row, own in zip(masks.rows.tolist(), bits, strict=True)}
