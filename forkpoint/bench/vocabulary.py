"""Prompts of exact lengths: random tokens, and the text of tokens."""

from __future__ import annotations

import numpy as np

from forkpoint.bench.request import TokenIds
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import ConfigError

NUM_CANDIDATES, MIN_STABLE = 8192, 64  # ordinary tokens that are tested, and stable ones that suffice
ATTEMPTS = 8  # rounds that adjust a text to its length
MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # constants of splitmix64


class Vocabulary:
    """The tokens of prompts: ordinary ones, and if there are enough, only those that survive decoding and encoding.

    Raises ConfigError for a tokenizer with special tokens only.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {*tokenizer.hf.all_special_ids, *(tokenizer.hf.added_tokens_decoder or {})}
        ordinary = [token for token in range(len(tokenizer.hf)) if token not in special]
        if not ordinary:
            raise ConfigError("the tokenizer has only special tokens; give another with --tokenizer")
        step = max(1, len(ordinary) // NUM_CANDIDATES)
        stable = [token for token in ordinary[::step] if self._is_stable(token)]
        self.tokens = np.asarray(stable if len(stable) >= MIN_STABLE else ordinary, np.int32)

    def random(self, rng: np.random.Generator, count: int) -> TokenIds:
        return self.tokens[rng.integers(0, len(self.tokens), count)]

    def of_names(self, names: TokenIds, seed: int) -> TokenIds:
        """Return a token for each name (a number for a trace's token): the same for the same name and seed."""
        mixed = names.astype(np.uint64) + np.uint64((seed * MIX[0]) % 2**64)
        mixed *= np.uint64(MIX[0])
        for shift, factor in ((30, MIX[1]), (27, MIX[2])):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return self.tokens[((mixed ^ (mixed >> np.uint64(31))) % np.uint64(len(self.tokens))).astype(np.int64)]

    def text(self, tokens: TokenIds) -> str:
        """Return a text that encodes to the same tokens, or at least to as many, where ATTEMPTS rounds reach that."""
        wanted = [int(token) for token in tokens]
        text = self._decode(wanted)
        for _ in range(ATTEMPTS):
            found = self.encode(text)
            if len(found) == len(wanted):
                break
            # Drop surplus tokens. Replace tokens lost by merging with ordinary ones.
            kept = found[: len(wanted)]
            text = self._decode([*kept, *wanted[: len(wanted) - len(kept)]])
        return text

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _is_stable(self, token: int) -> bool:
        text = self._decode([token])
        return text.strip() != "" and self.encode(text) == [token]
