"""Grammars of tool calls: in any text, and in place of what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from forkpoint.grammar.gbnf import literal
from forkpoint.grammar.tags import HEADER


class HeldCalls:
    """Holds the calls in one output to a grammar. Other text is free, so it may be sampled before it is followed.

    Tokens in flight when a call begins have no mask. If one of them does not fit the grammar, nothing can be held, and
    the call is free. So are calls within the thinking, because models also think about calls that they do not make.
    """

    def __init__(
        self,
        opening_id: int,
        first: Any,
        *,
        is_thinking: bool = False,
        think_id: int | None = None,
        think_end_id: int | None = None,
    ) -> None:
        """Take an llguidance.LLMatcher of what follows the token `opening_id`. It has not consumed a token.

        `think_id` and `think_end_id` are the tokens around thinking, if there are any. `is_thinking`: the prompt has
        opened it.
        """
        self.matcher: Any = None  # that of the call that is open
        self._opening_id = opening_id
        self._first = first
        self._think_id = think_id
        self._think_end_id = think_end_id
        self._is_thinking = is_thinking and think_end_id is not None

    def accept(self, token_id: int) -> None:
        """Follow one more token."""
        if self.matcher is not None:
            if not self.matcher.consume_token(token_id) or self.matcher.is_accepting():
                self.matcher = None
        elif token_id == self._think_end_id:
            self._is_thinking = False
        elif token_id == self._think_id:
            self._is_thinking = self._think_end_id is not None
        elif token_id == self._opening_id and not self._is_thinking:
            self.matcher = self._first.deep_copy()

    def copy(self) -> HeldCalls:
        """Return a copy that follows tokens of its own."""
        other = copy(self)
        if self.matcher is not None:
            other.matcher = self.matcher.deep_copy()
        return other


def grammar_of_calls(content: str, openings: Sequence[str], special_ids: Mapping[str, int]) -> dict[str, str]:
    """Return the llguidance grammar of an answer that is either content or begins with one of `openings`.

    `content` is the name of the content's grammar. Any text and any token of `special_ids` may follow an opening,
    because each family writes its calls in its own way, and values may hold the tags that end a call.
    """
    begins = [literal(opening) for opening in openings]
    begins += [f"<[{special_ids[opening]}]>" for opening in openings if opening in special_ids]
    rest = "/(?s:.*)/"
    if special_ids:
        tokens = ",".join(map(str, sorted(set(special_ids.values()))))
        rest = f"(/(?s:.+)/ | <[{tokens}]>)*"
    rules = [f"start: @{content} | ({' | '.join(begins)}) {rest}"]
    return {"name": "answer", "lark_grammar": "\n".join([HEADER, *rules])}
