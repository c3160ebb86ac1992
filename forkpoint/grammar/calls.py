"""Grammars of tool calls: in any text, and in place of what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.grammar.gbnf import literal
from forkpoint.grammar.tags import HEADER


@dataclass(frozen=True, slots=True)
class HeldCalls:
    """Holds the calls in an output to a grammar. Other text is free, so it may be sampled before it is followed.

    `matcher` is an llguidance.LLMatcher of what comes after the token `opening_id`. It has not consumed a token.
    """

    opening_id: int
    matcher: Any

    def after(self, matcher: Any, token_id: int) -> Any:
        """Return the matcher of the call that is open after `token_id`; None if there is none.

        `matcher` is that before the token. Tokens in flight when a call begins have no mask. If one of them does not
        fit the grammar, nothing can be held, and the call is free.
        """
        if matcher is None:
            return self.matcher.deep_copy() if token_id == self.opening_id else None
        if matcher.consume_token(token_id) and not matcher.is_accepting():
            return matcher
        return None


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
