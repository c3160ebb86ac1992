"""Answers as models write them, right and wrong, in every notation: whole, character by character, in random pieces.

The conditions are those that other servers' tests and models' own habits show. `text` is what the model says; the rest
is what a client has to get.
"""

from __future__ import annotations

import json
import time
import timeit
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.engine.call_writing import notation_name
from forkpoint.server.notations import NOTATIONS
from tests.server.conditions.condition import AB, SB, START, STOP, TB, TOOLS, Condition
from tests.server.conditions.json_answers import JSON
from tests.server.conditions.kimi_answers import KIMI
from tests.server.conditions.ling_answers import LING
from tests.server.conditions.python_answers import PYTHON
from tests.server.conditions.thinking_answers import THINKING
from tests.server.conditions.xml_answers import TYPES, XML
from tests.server.test_answer import taken_apart

CONDITIONS = [*XML, *TYPES, *JSON, *PYTHON, *KIMI, *LING, *THINKING]


def outcome(parser: str, chunks: list[str], *, inside: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, [(name, arguments)]) of an answer that came in `chunks`."""
    options: dict[str, Any] = {"reasoning": True, "starts_inside": inside, "tools": TOOLS}
    return taken_apart(chunks, **options, notation=NOTATIONS[notation_name(parser, None, "")])


@pytest.mark.parametrize("case", CONDITIONS, ids=lambda case: case.name)
def test_condition(case: Condition) -> None:
    for chunks in ([case.text], list(case.text)):
        reasoning, content, written = outcome(case.parser, chunks, inside=case.inside)
        calls = [(name, json.loads(arguments)) for name, arguments in written]
        assert (calls, content, reasoning) == (list(case.calls), case.content, case.reasoning)


@given(st.sampled_from(CONDITIONS), st.lists(st.integers(1, 12), max_size=80))
def test_pieces_do_not_matter(case: Condition, sizes: list[int]) -> None:
    chunks, rest = [], case.text
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    whole = outcome(case.parser, [case.text], inside=case.inside)
    assert outcome(case.parser, [*chunks, rest], inside=case.inside) == whole


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        # a tag in a value that ends a call there, or the whole call if the answer ends too
        ("qwen3_coder", "<function=opt><parameter=list><function=n><parameter=x></function></tool_call>"),
        # in a call of an undeclared function, the beginning of another call in a call in a value
        (
            "qwen3_coder",
            "<tool_call><function=x><parameter=a><function=y><parameter=b><tool_call></parameter</function>",
        ),
        ("mistral", '[TOOL_CALLS]run[CALL_ID]x{[ARGS]{"command": "ls"}'),  # a bracket in an id
        # a word behind the arguments
        ("hermes", '<tool_call>{"name": "run", "arguments": {}, "more": None}}</tool_call>'),
    ],
)
def test_what_the_next_character_decides_is_waited_for(parser: str, text: str) -> None:
    assert outcome(parser, list(text)) == outcome(parser, [text])


@given(st.sampled_from(CONDITIONS), st.data())
def test_damaged_answers_in_pieces_are_those_of_the_whole(case: Condition, data: st.DataObject) -> None:
    """Parts of an answer are left out, repeated and moved into another. Arguments are JSON nevertheless."""
    text = case.text
    for _ in range(data.draw(st.integers(1, 3))):
        other = data.draw(st.sampled_from([each.text for each in CONDITIONS if each.parser == case.parser]))
        start, end = sorted(data.draw(st.integers(0, len(other))) for _ in range(2))
        at, gap = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 20))
        text = text[:at] + data.draw(st.sampled_from(["", "\u2028", "\xa0", other[start:end]])) + text[at + gap :]
    whole = outcome(case.parser, [text], inside=case.inside)
    assert outcome(case.parser, list(text), inside=case.inside) == whole
    for _, arguments in whole[2]:
        json.loads(arguments)


@pytest.mark.parametrize(
    ("parser", "begin", "again", "end"),
    [
        (
            "qwen3_coder",
            "<tool_call><function=run><parameter=command>",
            "</tool_call>\n",
            "</parameter></function></tool_call>",
        ),
        ("qwen3_coder", "", "<tool_call><function=other><parameter=x>", ""),
        ("hermes", '<tool_call>{"name": "run", "arguments": {"command": "', '</tool_call> "b" ', '"}}</tool_call>'),
        ("llama3_json", "", '{"name": {"name": ', ""),
        ("lfm2", f"{START}[run(command='", "a 'b' ", f"')]{STOP}"),
        ("lfm2", START, "[run(command=", ""),
        ("kimi_k2", SB, f'{TB}other:0{AB}{{"a": "', ""),
        ("qwen3_coder", "", " " * 40, ""),
    ],
)
def test_the_time_grows_with_the_length_of_the_answer(parser: str, begin: str, again: str, end: str) -> None:
    def seconds(number: int) -> float:
        text = begin + again * number + end
        chunks = [text[start : start + 40] for start in range(0, len(text), 40)]
        return timeit.timeit(lambda: outcome(parser, chunks), timer=time.process_time, number=1)

    # Four times as long. The square would be sixteen times, each time. A busy machine makes one reading slow.
    assert any(seconds(4000) < 0.05 + 8 * seconds(1000) for _ in range(3))
