"""Calls written into a conversation are those that the server reads from an answer in the same notation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forkpoint.engine.call_writing import WRITERS, NotationName
from forkpoint.server.answer import AnswerParser, CallPart
from forkpoint.server.notations import NOTATIONS

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text("abc é\n\"'\\{}[]", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3),
    max_leaves=6,
)
TEXTS_BETWEEN_TAGS = {"qwen_xml", "ling"}  # what a text looks like there, its schema has to say
TEXT_SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}


@pytest.mark.parametrize("notation", WRITERS)
@settings(max_examples=50, deadline=None)
@example(values=["\n"])
@example(values=["\na\n\n"])
@given(values=st.lists(JSON_VALUES, min_size=1, max_size=3))
def test_written_calls_are_read_again(notation: NotationName, values: list[Any]) -> None:
    calls = [
        {"id": f"functions.f:{number}", "function": {"name": "f", "arguments": {"x": value}}}
        for number, value in enumerate(values)
    ]
    are_texts = notation in TEXTS_BETWEEN_TAGS and all(isinstance(value, str) for value in values)
    if notation in TEXTS_BETWEEN_TAGS and not are_texts:
        values = [value for value in values if not isinstance(value, str)]
        calls = [call for call in calls if not isinstance(call["function"]["arguments"]["x"], str)]  # type: ignore[index]
    parser = AnswerParser(tools={"f": TEXT_SCHEMA if are_texts else {}}, notation=NOTATIONS[notation])
    pieces = parser.feed(WRITERS[notation](calls)) + parser.finish()
    read = [(piece.name, json.loads(piece.text)) for piece in pieces if isinstance(piece, CallPart)]
    assert len(read) == len(pieces) and read == [("f", {"x": value}) for value in values]
