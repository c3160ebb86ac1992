"""Compiles what outputs have to match into masks over the vocabulary. llguidance does the work and is loaded when
needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import InvalidParamsError, StructuredOutputError
from forkpoint.grammar.budget import ThinkingBudget
from forkpoint.grammar.calls import HeldCalls
from forkpoint.grammar.masks import TokenRules, bad_word_ids
from forkpoint.grammar.schema import relaxed
from forkpoint.grammar.source import BYTES_SPECIAL_ID, Description, slow_name
from forkpoint.params import THINK, THINK_END, CallsParams, SamplingParams, StructuredOutputsParams, Thinking

MAX_KEPT_GRAMMARS = 256
MAX_KEPT_MATCHERS = 16
MAX_COPIES = 64  # copies of a matcher share its lexer, which grows with every text up to a limit


@dataclass(slots=True)
class _Kept:
    """An llguidance.LLMatcher that has not consumed a token, and how often it was copied."""

    matcher: Any
    num_copies: int = 0


class GrammarCompiler:
    """Starts grammars for one tokenizer and vocabulary. Threads may share it. Compiled grammars are kept.

    `compact`: JSON has no line breaks, whether a request asks for that or not.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int], *, compact: bool = False
    ) -> None:
        self._compact = compact
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._llguidance: Any = None  # its LLTokenizer, once loaded
        self._grammar = lru_cache(MAX_KEPT_GRAMMARS)(Description.grammar)
        self._matchers: dict[Description, _Kept] = {}  # oldest first

    def prepare(self) -> None:
        """Read the vocabulary now rather than with the first request. A large one takes seconds."""
        if self._tokenizer is not None:
            with suppress(InvalidParamsError):  # reported to the first request that needs it
                self._loaded()

    def start(self, params: SamplingParams, stop_token_ids: Collection[int]) -> TokenRules | None:
        """Return the rules of all that `params` require of output ids; None if they require nothing.

        `stop_token_ids` end the request. Of the end-of-sequence ids, only these may follow a complete output. Raises
        InvalidParamsError for what cannot be compiled, without a tokenizer, and if no token can come first.
        """
        if not params.restricts_tokens:
            return None
        wanted, words = params.structured_outputs, []
        budget: ThinkingBudget | None = None
        if self._tokenizer is not None:
            words = bad_word_ids(self._tokenizer, params.bad_words)
            if params.limits_thinking:
                budget = ThinkingBudget(params, self._tokenizer, self._tokenizer.tool_call_token_ids)
        elif wanted is not None or params.calls or params.bad_words or params.limits_thinking:
            name = "thinking_token_budget"
            if wanted is not None:
                name = "structured_outputs"
            elif params.calls:
                name = "calls"
            elif params.bad_words:
                name = "bad_words"
            raise InvalidParamsError(f"{name} need a tokenizer; start without skip_tokenizer_init")
        rules = partial(
            TokenRules,
            self._vocab_size,
            allowed=params.allowed_token_ids,
            bad_words=words,
            stop_token_ids=frozenset(stop_token_ids),
            min_tokens=params.min_tokens,
            budget=budget,
        )
        start, failure = rules, "no token can come"
        if wanted is not None:
            start = partial(self._structured, params, stop_token_ids, rules)
            failure = "structured_outputs cannot be met"
        elif params.calls is not None:
            start = partial(rules, num_ids=self._loaded().vocab_size, calls=self._held(params.calls, params.thinking))
        try:
            found = start()
        except StructuredOutputError as error:
            raise InvalidParamsError(f"{failure}: {error}") from error
        if found.mask is None:
            raise InvalidParamsError("structured_outputs match only the empty text; ask for at least one character")
        return found

    def _structured(
        self, params: SamplingParams, stop_token_ids: Collection[int], rules: Callable[..., TokenRules]
    ) -> TokenRules:
        wanted = params.structured_outputs
        assert self._tokenizer is not None and wanted is not None
        loaded = self._loaded()
        ends = frozenset(loaded.eos_tokens)
        description = self._description(params, wanted, ends)
        forbidden = ends - set(stop_token_ids)
        if not wanted.structural_tag:  # structural tags may name special tokens; texts do not contain them otherwise
            named = {token_id for _, token_id in description.special_ids}
            forbidden |= frozenset(self._tokenizer.hf.all_special_ids) - ends - named
        rules = partial(rules, forbidden=forbidden, num_ids=loaded.vocab_size, ends=ends)
        try:
            return rules(matcher=self._matcher(description))
        except StructuredOutputError:
            with self._lock:
                kept = self._matchers.pop(description, None)
            if kept is None or kept.num_copies == 1:
                raise
        return rules(matcher=self._matcher(description))  # other requests had used up the limits of their shared lexer

    def _held(self, calls: CallsParams, thinking: Thinking) -> HeldCalls:
        """Return what holds calls to their structure. Raises InvalidParamsError if no token opens them."""
        assert self._tokenizer is not None
        id_of = self._tokenizer.backend.token_to_id
        opening_id = id_of(calls.opening)
        if opening_id is None:
            raise InvalidParamsError(f"calls.opening is {calls.opening!r}; give the text of one token")
        compact, special_ids = self._is_compact(calls.structure), self._special_ids()
        description = Description.of(calls.structure, compact=compact, thinking="none", special_ids=special_ids)
        ids = {} if thinking == "none" else {"think_id": id_of(THINK), "think_end_id": id_of(THINK_END)}
        return HeldCalls(opening_id, self._matcher(description), is_thinking=thinking == "open", **ids)

    def slow_name(self, wanted: StructuredOutputsParams) -> str | None:
        """Return the parameter's name if compiling it may take long; None if it is always quick.

        Run `check` in another process first if it may.
        """
        return slow_name(wanted)

    def relaxed(self, schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return a JSON schema without keywords that cannot be enforced, and why each is left out."""
        return relaxed(schema)

    def check(self, wanted: StructuredOutputsParams) -> None:
        """Compile what is wanted once. Raises InvalidParamsError. May take long, or crash the process."""
        if self._tokenizer is not None:
            special_ids: dict[str, int] = {}
            if wanted.structural_tag:
                special_ids = dict.fromkeys(self._added_tokens(), BYTES_SPECIAL_ID)
            Description.of(wanted, compact=self._is_compact(wanted), thinking="none", special_ids=special_ids).check()

    def _description(
        self, params: SamplingParams, wanted: StructuredOutputsParams, ends: Collection[int]
    ) -> Description:
        """Describe what `params` require, with the special tokens that its grammar may name."""
        special_ids, openings = self._special_ids(), tuple(params.call_openings)
        if wanted.structural_tag:
            openings = ()  # a structural tag describes calls itself
        elif openings:
            special_ids = {text: token for text, token in special_ids.items() if token not in ends}
        else:
            tags = (THINK, THINK_END) if params.thinking != "none" else ()
            special_ids = {tag: special_ids[tag] for tag in tags if tag in special_ids}
        return Description.of(
            wanted,
            compact=self._is_compact(wanted),
            thinking=params.thinking,
            special_ids=special_ids,
            call_openings=openings,
        )

    def _is_compact(self, wanted: StructuredOutputsParams) -> bool:
        return self._compact or wanted.disable_any_whitespace

    def _added_tokens(self) -> dict[str, int]:
        """Map the texts of added tokens, which are not part of the vocabulary's text, to their ids."""
        assert self._tokenizer is not None
        return {added.content: token for token, added in self._tokenizer.backend.get_added_tokens_decoder().items()}

    def _special_ids(self) -> dict[str, int]:
        """Map the texts of tokens that llguidance does not read as text to their ids."""
        loaded = self._loaded()
        return {text: token for text, token in self._added_tokens().items() if loaded.is_special_token(token)}

    def _matcher(self, description: Description) -> Any:
        """Return an llguidance.LLMatcher that has not consumed a token, a copy of a kept one."""
        with self._lock:
            kept = self._matchers.get(description)
        if kept is None:
            kept = _Kept(description.matcher(self._loaded(), self._grammar(description)))
        with self._lock:
            kept.num_copies += 1
            self._matchers[description] = kept
            if kept.num_copies >= MAX_COPIES:
                del self._matchers[description]
            while len(self._matchers) > MAX_KEPT_MATCHERS:
                del self._matchers[next(iter(self._matchers))]
            return kept.matcher.deep_copy()

    def _loaded(self) -> Any:
        with self._lock:
            if self._llguidance is None:
                assert self._tokenizer is not None
                self._llguidance = _read(self._tokenizer.backend, self._vocab_size, self._eos_token_ids)
            return self._llguidance


def _read(backend: Any, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """Return the tokenizer as llguidance's LLTokenizer. Raises InvalidParamsError if it is not supported."""
    from llguidance import LLTokenizer

    num_ids = max(vocab_size, backend.get_vocab_size())
    ends = [token_id for token_id in eos_token_ids if backend.id_to_token(token_id) is not None]
    try:
        return LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=ends or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise InvalidParamsError(f"structured_outputs are not possible with this tokenizer: {error}") from error
