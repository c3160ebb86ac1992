"""One output on its way under a grammar of llguidance."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from copy import copy
from typing import Any

import numpy as np

from forkpoint.errors import StructuredOutputError
from forkpoint.grammar.token_rules import Bits, id_bits
from forkpoint.sched.plan import IntArray

MAX_TOKEN_S = 2.0  # what following one token may take; ambiguous grammars take longer with every token


class TokenGrammar:
    """Implements `sched.request.Grammar`: follows one output, and knows after each token what may come next.

    The output is whole when no token but an end can follow. Before `min_tokens`, no stop token may come unless
    nothing else can: the grammar wins. `matcher` is an llguidance.LLMatcher that has followed nothing yet, over
    `num_ids` ids, of which the model has the first `vocab_size`.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        *,
        num_ids: int,
        ends: Collection[int],
        forbidden: Collection[int],
        stop_token_ids: Collection[int],
        min_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._matcher = matcher
        self._num_words = -(-num_ids // 32)
        self._no_ends = ~id_bits(ends, vocab_size)
        self._permitted = id_bits(range(vocab_size), vocab_size) & ~id_bits(forbidden, vocab_size)
        self._no_stops = ~id_bits(stop_token_ids, vocab_size)
        self._ends = frozenset(ends)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._clock = clock
        self._mask = self._next()

    @property
    def mask(self) -> IntArray | None:
        """The ids that may come next, `[ceil(V / 32)]`; None: the output is whole."""
        return self._mask

    def accept(self, token_id: int) -> None:
        """Follow one more token; an end makes the output whole.

        Raises StructuredOutputError if it may not come, nothing can come after it, or following it takes too much.
        """
        if self._mask is None:
            raise StructuredOutputError(f"token {token_id} comes after what structured_outputs ask for is whole")
        started = self._clock()
        if token_id in self._ends and self._allows(token_id):
            self._mask = None
            return
        try:
            self._follow(token_id)
        except StructuredOutputError:
            raise
        except Exception as error:  # the matcher's; of whatever kind, it concerns this output alone
            text = f"the output could not be followed: {type(error).__name__}: {error}"
            raise StructuredOutputError(text) from error
        elapsed = self._clock() - started
        if elapsed > MAX_TOKEN_S:
            raise StructuredOutputError(
                f"following one token took {elapsed:.1f} s, the limit is {MAX_TOKEN_S}; make structured_outputs less "
                "ambiguous (nested repetitions, long alternatives that begin alike)"
            )

    def _follow(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise StructuredOutputError(
                f"token {token_id} does not go on with what structured_outputs ask for{self._reason()}"
            )
        self._num_tokens += 1
        self._mask = self._next()

    def copy(self) -> TokenGrammar:
        """One that goes its own way from here."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _allows(self, token_id: int) -> bool:
        assert self._mask is not None
        return token_id < 32 * len(self._mask) and bool(self._mask[token_id // 32] >> token_id % 32 & 1)

    def _next(self) -> IntArray | None:
        filled = np.zeros(self._num_words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(filled.ctypes.data, filled.nbytes)
        if self._matcher.is_error():
            raise StructuredOutputError(f"what may come next cannot be told{self._reason()}")
        bits: Bits = filled[: len(self._permitted)] & self._permitted
        if not (bits & self._no_ends).any():
            if self._matcher.is_accepting():
                return None
            raise StructuredOutputError(
                f"after {self._num_tokens} tokens no token of the vocabulary goes on with what is asked for"
            )
        if self._num_tokens < self._min_tokens and (bits & self._no_stops).any():
            bits &= self._no_stops
        mask: IntArray = bits.view(np.int32)
        return mask

    def _reason(self) -> str:
        """What the matcher complains of, without its state."""
        text = " ".join(str(self._matcher.get_error()).partition("\n<state>")[0].split())
        return f": {text[:200]}; make structured_outputs simpler" if "limit" in text or "too many" in text else ""
