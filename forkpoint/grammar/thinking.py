"""Grammars that apply after the thinking. Any text may come before."""

from __future__ import annotations

from collections.abc import Mapping

from forkpoint.grammar.gbnf import literal
from forkpoint.grammar.tags import HEADER
from forkpoint.params import THINK, THINK_END, Thinking

# Models write one or two line breaks between thinking and content, which belong to neither.
LINE_BREAKS = r"LINE_BREAKS: /\n{1,2}/"


def grammar_of_thinking(content: str, thinking: Thinking, special_ids: Mapping[str, int]) -> dict[str, str]:
    """Return the grammar of thinking (optional, or begun already) and of the content after it.

    `content` is the name of the content's grammar. `special_ids` are the ids of tags that are tokens. Models may also
    spell out such tags.
    """
    openings, up_to_end = [literal(THINK)], ["spelled"]
    if THINK in special_ids:
        openings.append(f"<[{special_ids[THINK]}]>")
    if THINK_END in special_ids:
        up_to_end.append(f"/(?s:.*)/ <[{special_ids[THINK_END]}]>")
    start = f"thought @{content}"
    if thinking == "optional":
        start = f"(({' | '.join(openings)}) thought)? @{content}"
    rules = [
        f"start: {start}",
        f"thought: ({' | '.join(up_to_end)}) LINE_BREAKS?",
        "spelled[lazy]: SPELLED",
        f"SPELLED: /(?s:.*)/ {literal(THINK_END)}",
        LINE_BREAKS,
    ]
    return {"name": "thinking", "lark_grammar": "\n".join([HEADER, *rules])}
