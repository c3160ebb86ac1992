"""Converts what a request asks for to what llguidance compiles. Checks sizes first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forkpoint.errors import InvalidParamsError
from forkpoint.grammar.calls import grammar_of_calls
from forkpoint.grammar.gbnf import literal, parser_grammar, regex_literal
from forkpoint.grammar.schema import check_depth, complaint_in_a_line, enforceable, located
from forkpoint.grammar.tags import HEADER, grammars_of_tags
from forkpoint.grammar.thinking import grammar_of_thinking
from forkpoint.params import OUTPUT_WORDS, StructuredOutputsParams, Thinking

MAX_PLAIN_SCHEMA = 2000  # characters
# Patterns, combinations, references, large numbers, and escapes, which could hide any of them.
_NOT_PLAIN = re.compile(r"[pP]attern|(?:all|one|multiple)Of|\$ref|not|depend|contain|unevaluated|Names|\d{3}|\\")
_PARENTHESES = re.compile(r'\\.|"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\])*\]|[()]', re.DOTALL)
MAX_DESCRIPTION_LENGTH = 128 * 1024  # characters of a schema, a grammar or all choices
BYTES_SPECIAL_ID = 256  # in llguidance's vocabulary of single bytes
MAX_REGEX_LENGTH = 16 * 1024  # characters; the time of every mask is proportional to it


@dataclass(frozen=True, slots=True)
class Description:
    """A requested output: the parameter's name and text, and whether thinking comes before the output.

    `special_ids` are the special tokens that the grammar names. Any output that begins with one of `call_openings` is
    a call, which the request does not constrain.
    """

    name: str
    text: str
    compact: bool
    thinking: Thinking = "none"
    special_ids: tuple[tuple[str, int], ...] = ()
    call_openings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        wanted: StructuredOutputsParams,
        *,
        compact: bool,
        thinking: Thinking,
        special_ids: Mapping[str, int],
        call_openings: tuple[str, ...] = (),
    ) -> Description:
        """Describe the output that is `wanted`. Raises InvalidParamsError if it is too long or nested too deep."""
        name, text = _named(wanted)
        limit = MAX_REGEX_LENGTH if name == "regex" else MAX_DESCRIPTION_LENGTH
        if len(text) > limit:
            raise InvalidParamsError(f"{OUTPUT_WORDS[name]} has {len(text)} characters; give at most {limit}")
        if name in ("json", "structural_tag"):
            check_depth(text, name)
        if name in ("regex", "grammar"):
            check_depth(text, name, _PARENTHESES, "levels of parentheses")
        return cls(name, text, compact, thinking, tuple(special_ids.items()), call_openings)

    def grammar(self) -> str:
        """Return the grammar that llguidance reads. Raises InvalidParamsError if it cannot be enforced."""
        if self.name == "structural_tag":
            grammars = grammars_of_tags(self.text, dict(self.special_ids), compact=self.compact)
        else:
            grammars = [{"name": "content", "lark_grammar": f"{HEADER}\n{self._rules()}"}]
        if self.call_openings:
            calls = grammar_of_calls(grammars[0]["name"], self.call_openings, dict(self.special_ids))
            grammars = [calls, *grammars]
        if self.thinking != "none":
            thinking = grammar_of_thinking(grammars[0]["name"], self.thinking, dict(self.special_ids))
            grammars = [thinking, *grammars]
        return json.dumps({"grammars": grammars})

    def _rules(self) -> str:
        if self.name in ("json", "json_object"):
            return f"start: %json {enforceable(self.text, compact=self.compact)}"
        if self.name == "choice":
            return self.text
        try:
            if self.name == "regex":
                return f"start: {regex_literal(self.text)}"
            return parser_grammar(self.text, compact=self.compact)
        except Exception as error:  # any error concerns only this text
            raise refusal(self.name, str(error)) from error

    def check(self) -> None:
        """Compile it once, over single bytes. All `special_ids` must be BYTES_SPECIAL_ID.

        Raises InvalidParamsError.
        """
        from llguidance import LLTokenizer

        self.matcher(LLTokenizer("byte"), self.grammar())

    def matcher(self, tokenizer: Any, grammar: str) -> Any:
        """Return an llguidance.LLMatcher of the `grammar` that has not consumed a token.

        Raises InvalidParamsError if llguidance refuses any part of it.
        """
        matcher, complaint = _compiled(tokenizer, grammar)
        if complaint and self.name == "json":
            located(enforceable(self.text, compact=self.compact), _complaint_of_schema)
        if complaint:
            raise refusal(self.name, complaint)
        return matcher


def _compiled(tokenizer: Any, grammar: str) -> tuple[Any, str]:
    """Return a matcher, and llguidance's errors and warnings about the grammar; empty if there are none."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    return matcher, str(matcher.get_error()) or "; ".join(matcher.get_grammar_warnings())


def _complaint_of_schema(schema: str) -> str:
    from llguidance import LLMatcher, LLTokenizer

    try:
        return _compiled(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema))[1]
    except ValueError as error:  # a text that is not Unicode, because it has half of a surrogate pair
        return str(error)


def refusal(name: str, complaint: str) -> InvalidParamsError:
    return InvalidParamsError(f"{OUTPUT_WORDS[name]} cannot be compiled: {complaint_in_a_line(complaint)}")


def limits() -> Any:
    """Return llguidance's limits of one grammar and of one mask. A request that exceeds them ends."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=20_000, max_items_in_row=10_000, max_lexer_states=100_000, precompute_large_lexemes=False
    )


def slow_name(wanted: StructuredOutputsParams) -> str | None:
    """Return the parameter's name if compiling it may take long; None if it is always quick."""
    name, text = _named(wanted)
    plain = len(text) <= MAX_PLAIN_SCHEMA and not _NOT_PLAIN.search(text)
    if name in ("choice", "json_object") or (name == "json" and plain):
        return None
    return name


def _named(wanted: StructuredOutputsParams) -> tuple[str, str]:
    if wanted.choice is not None:
        return "choice", "start: CHOICE\nCHOICE: " + " | ".join(literal(text) for text in wanted.choice)
    if wanted.json_object:
        return "json_object", '{"type": "object"}'
    for name in ("json", "regex", "grammar", "structural_tag"):
        text = getattr(wanted, name)
        if text is not None:
            return name, text
    raise AssertionError("StructuredOutputsParams checks that something is given")
