"""A grammar of one text: the next token is always the given one."""

from __future__ import annotations

from copy import copy

import numpy as np

from forkpoint.errors import StructuredOutputError
from forkpoint.sched.plan import IntArray

BITS_PER_WORD = 32


class ForcedTokens:
    """Implements `sched.request.Grammar` for one sequence of ids."""

    is_free = False

    def __init__(self, token_ids: IntArray, vocab_size: int) -> None:
        self._token_ids = token_ids
        self._num_words = -(-vocab_size // BITS_PER_WORD)
        self._position = 0

    @property
    def mask(self) -> IntArray | None:
        if self._position == len(self._token_ids):
            return None
        word, bit = divmod(int(self._token_ids[self._position]), BITS_PER_WORD)
        words = np.zeros(self._num_words, np.uint32)
        words[word] = np.uint32(1) << np.uint32(bit)
        return words.view(np.int32)

    def copy(self) -> ForcedTokens:
        return copy(self)

    def accept(self, token_id: int) -> None:
        if token_id != self._token_ids[self._position]:
            wanted = int(self._token_ids[self._position])
            raise StructuredOutputError(f"token {token_id} was sampled where only {wanted} is allowed")
        self._position += 1
