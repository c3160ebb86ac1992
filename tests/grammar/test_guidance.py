"""Grammars in the form that guidance's client for vLLM sends."""

from __future__ import annotations

import json

import pytest

from tests.grammar.test_grammar import BYTES, takes

HEADER = "%llguidance {}\n\n"
SPACES = {"whitespace_flexible": False, "whitespace_pattern": None, "item_separator": ",", "key_separator": ":"}
SCHEMA = {"type": "object", "properties": {"a/*": {"enum": ['"%json {', "x"]}}, "required": ["a/*"]}


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        ('start: "It is " a\na[capture]: A\n\nA: "yes"\n     | "no"\n', ["It is yes", "It is no"], ["yes", "It is"]),
        ("start: a\na[capture]: A\nA: /[0-9]{3}/\n", ["123"], ["12", "1234"]),
        ('start: "Hm " a\na[capture, stop="."]: A\nA: /(?s:.*)/\n', ["Hm so."], ["Hmso."]),
        ("start: a\na[capture, max_tokens=5]: A\nA: /(?s:.*)/\n", ["so"], []),
        (
            'start: a\na[capture]: A\nA: %regex {"substring_chunks": ["the", " ", "cat"]}\n',
            ["the", " cat"],
            ["cat the"],
        ),
        (
            f"start: a /[.%]/ // %json\n\na[capture]: %json {json.dumps(SCHEMA, indent=2)}\n",
            ['{"a/*": "x"}.', '{"a/*":\n"\\"%json {"}%'],
            ['{"a/*":"x"}', '{"a/*": "y"}.', "{}."],
        ),
        (
            f"start: b %json {json.dumps({**SCHEMA, 'x-guidance': SPACES})}\nb: %json {{}}",
            ['1{"a/*":"x"}'],
            ['1{"a/*": "x"}'],
        ),
    ],
)
def test_its_grammars_hold(grammar: str, taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not takes(BYTES, text, grammar=HEADER + grammar)] == []
    assert [text for text in refused if takes(BYTES, text, grammar=HEADER + grammar)] == []
