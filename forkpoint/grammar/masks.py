"""Computes which ids may come next: under `allowed_token_ids`, `bad_words` and a grammar of llguidance."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import StructuredOutputError
from forkpoint.grammar.budget import ThinkingBudget
from forkpoint.grammar.calls import HeldCalls
from forkpoint.grammar.schema import complaint_in_a_line
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import MOST_IN_FLIGHT

MAX_TOKEN_S = 2.0  # limit in seconds for following one token; ambiguous grammars take longer with every token
Bits = npt.NDArray[np.uint32]


class TokenRules:
    """Implements `sched.request.Grammar`: follows one output and knows which ids may come next.

    `allowed` are the only ids that may come (None: all ids). `forbidden` ids may not. No sequence of `bad_words` may be
    completed within the output. `stop_token_ids` may not come before `min_tokens`. `matcher` is an llguidance.LLMatcher
    over `num_ids` ids that has not consumed a token. Without a matcher any text is allowed. The output is complete when
    only one of `ends` may follow. In place of a matcher, `calls` may hold the calls in any text. Before `min_tokens` a
    stop token may come if the matcher allows nothing else. An id that `budget` forces comes even if `allowed` or
    `bad_words` exclude it, but not against the matcher or `min_tokens`.
    Raises StructuredOutputError if nothing may come.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Collection[int] | None = None,
        forbidden: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        matcher: Any = None,
        num_ids: int = 0,
        ends: Collection[int] = (),
        budget: ThinkingBudget | None = None,
        calls: HeldCalls | None = None,
    ) -> None:
        self._budget = budget
        self._excludes_ids = allowed is not None or bool(forbidden) or bool(bad_words)
        self._matcher = matcher
        self._calls = calls
        self._num_words = -(-num_ids // 32)
        self._ends, self._no_ends = frozenset(ends), ~id_bits(ends, vocab_size)
        alone = [word[-1] for word in bad_words if len(word) == 1]
        if allowed is None:
            allowed = range(vocab_size)
        self._permitted = id_bits(allowed, vocab_size)
        self._permitted &= ~id_bits([*forbidden, *alone], vocab_size)
        self._no_stops = ~id_bits(stop_token_ids, vocab_size)
        self._min_tokens = min_tokens
        self._words: dict[int, list[tuple[int, ...]]] = {}  # second to last id -> bad words of several ids
        for word in bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(tuple(word))
        self._most_before = max(map(len, bad_words), default=1) - 1
        self._latest: list[int] = []  # the last output ids, as many as a bad word may begin with
        self._num_tokens = 0
        self._clock = time.perf_counter
        self.mask = self._next()  # the ids that may come next, `[ceil(V / 32)]`; None: the output is complete

    @property
    def is_free(self) -> bool:
        if self._excludes_ids or self._matcher is not None:
            return False
        return self._budget is None or self._budget.is_far(MOST_IN_FLIGHT)

    def accept(self, token_id: int) -> None:
        """Follow one more token, after which `mask` has changed. One of `ends` completes the output.

        Raises StructuredOutputError if the token may not come, nothing can come after it, or following it takes too
        long.
        """
        if self.mask is None:
            raise StructuredOutputError(
                f"token {token_id} comes after the output that structured_outputs ask for is complete"
            )
        started = self._clock()
        if token_id in self._ends and self._allows(token_id):
            self.mask = None
            return
        try:
            self._follow(token_id)
        except StructuredOutputError:
            raise
        except Exception as error:  # any error of the matcher ends only this output
            text = f"the output could not be followed: {type(error).__name__}: {error}"
            raise StructuredOutputError(text) from error
        elapsed = self._clock() - started
        if elapsed > MAX_TOKEN_S:
            raise StructuredOutputError(
                f"following one token took {elapsed:.1f} s, the limit is {MAX_TOKEN_S}; make structured_outputs less "
                "ambiguous (nested repetitions, long alternatives that begin alike)"
            )

    def copy(self) -> TokenRules:
        """Return a copy that follows tokens of its own."""
        other = copy(self)
        if self._calls is not None:
            other._calls = self._calls.copy()
            other._matcher = other._calls.matcher
        elif self._matcher is not None:
            other._matcher = self._matcher.deep_copy()
        if self._budget is not None:
            other._budget = self._budget.copy()
        return other

    def _allows(self, token_id: int) -> bool:
        assert self.mask is not None
        return token_id < 32 * len(self.mask) and bool(self.mask[token_id // 32] >> token_id % 32 & 1)

    def _follow(self, token_id: int) -> None:
        if self._calls is not None:
            self._calls.accept(token_id)
            self._matcher = self._calls.matcher
        elif self._matcher is not None and not self._matcher.consume_token(token_id):
            raise StructuredOutputError(
                f"token {token_id} does not go on with what structured_outputs ask for{self._reason()}"
            )
        self._num_tokens += 1
        if self._budget is not None:
            self._budget.accept(token_id)
        if self._most_before:
            self._latest = [*self._latest, token_id][-self._most_before :]
        self.mask = self._next()

    def _next(self) -> IntArray | None:
        matched = self._matched()
        forced = self._forced(matched)
        if forced is not None:
            return forced
        bits = self._permitted
        if matched is not None:
            bits = bits & matched
            if not (bits & self._no_ends).any():
                if self._matcher.is_accepting():
                    return None
                raise StructuredOutputError(
                    f"after {self._num_tokens} tokens no token of the vocabulary goes on with what is asked for"
                )
        if self._num_tokens < self._min_tokens:
            later = bits & self._no_stops
            if self._matcher is None or later.any():
                bits = later
        banned = self._banned()
        if banned:
            bits = bits & ~id_bits(banned, 32 * len(bits))
        if (banned or self._matcher is None) and not bits.any():  # otherwise the matcher has raised above
            raise StructuredOutputError(
                f"after {self._num_tokens} tokens, allowed_token_ids, bad_words and other parameters leave no token"
            )
        mask: IntArray = bits.view(np.int32)
        return mask

    def _forced(self, matched: Bits | None) -> IntArray | None:
        """Return the mask of the id that ends the thinking; None if no id is forced.

        If the forced id may not come, nothing is forced any more.
        """
        budget = self._budget
        if budget is None or budget.forced_id is None:
            return None
        bits = id_bits([budget.forced_id], 32 * len(self._permitted))
        if matched is not None:
            bits &= matched
        if self._num_tokens < self._min_tokens:
            bits &= self._no_stops
        if not bits.any():
            budget.stop()
            return None
        mask: IntArray = bits.view(np.int32)
        return mask

    def _matched(self) -> Bits | None:
        """Return the ids that the matcher allows next; None without one. Raises StructuredOutputError."""
        if self._matcher is None:
            return None
        filled = np.zeros(self._num_words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(filled.ctypes.data, filled.nbytes)
        if self._matcher.is_error():
            raise StructuredOutputError(f"the next tokens cannot be computed{self._reason()}")
        return filled[: len(self._permitted)]

    def _banned(self) -> list[int]:
        """Return the ids that would complete a bad word now."""
        if not self._latest:
            return []
        words = self._words.get(self._latest[-1], ())
        return [word[-1] for word in words if tuple(self._latest[1 - len(word) :]) == word[:-1]]

    def _reason(self) -> str:
        """Return the matcher's error as the end of a message if a limit was exceeded; otherwise empty."""
        text = complaint_in_a_line(str(self._matcher.get_error()))
        if "limit" not in text and "too many" not in text:
            return ""
        return f": {text}; make structured_outputs simpler"


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the ids of each word at the start of a text, and after a space, as vLLM does.

    The latter only if they are as many and begin otherwise. Words without ids are left out.
    """
    found = []
    for word in words:
        bare = word.lstrip() or word
        at_start, spaced = (tokenizer.backend.encode(text, add_special_tokens=False).ids for text in (bare, " " + bare))
        found.append(at_start)
        if len(spaced) == len(at_start) and spaced[:1] != at_start[:1]:
            found.append(spaced)
    return [ids for ids in found if ids]


def id_bits(token_ids: Collection[int], vocab_size: int) -> Bits:
    """Return `[ceil(vocab_size / 32)]` words with bit `t % 32` of word `t // 32` set for each given id `t`.

    Ids beyond the vocabulary are ignored.
    """
    flags = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    flags[np.fromiter((token for token in token_ids if token < vocab_size), np.int64)] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
