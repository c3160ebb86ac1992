"""Grammars of answers that may be tool calls instead of what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forkpoint.grammar.gbnf import literal
from forkpoint.grammar.tags import HEADER


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
