"""Answers taken apart: reasoning, content, tool calls, in whole and in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.server.answer import AnswerParser, CallPart, Content, Piece, Reasoning

TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\\u00f6ln {\\"x\\"}", "days": 3}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBad <b>Ems</b>\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def taken_apart(chunks: list[str], **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, [(name, arguments)]) of an answer that came in `chunks`."""
    parser = AnswerParser(**options)
    pieces: list[Piece] = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish()
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallPart):
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    assert parser.num_calls == len(calls)
    return reasoning, content, calls


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("plain <text> </think>", {}, ("", "plain <text> </think>", [])),
        ("<think>\nhm\n</think>\n\nso", {"reasoning": True}, ("hm", "so", [])),
        ("hm\n</think>\n\nso", {"reasoning": True, "starts_inside": True}, ("hm", "so", [])),
        ("\n <think>never ends", {"reasoning": True}, ("never ends", "", [])),
        ("no thought <think>x</think>", {"reasoning": True}, ("", "no thought <think>x</think>", [])),
        ("<think>x</think>y", {}, ("", "<think>x</think>y", [])),
        ("<thi", {"reasoning": True}, ("", "<thi", [])),
        ("a <tool_call> is a tag", {}, ("", "a <tool_call> is a tag", [])),
        ("ends with <tool_ca", {"tools": TOOLS}, ("", "ends with <tool_ca", [])),
        ("spaces  \n", {"tools": TOOLS}, ("", "spaces  \n", [])),
    ],
)
def test_reasoning_and_content(text: str, options: dict[str, Any], expected: tuple[str, str, list[Any]]) -> None:
    assert taken_apart([text], **options) == expected
    assert taken_apart(list(text), **options) == expected


@pytest.mark.parametrize("call", [CALL, XML_CALL])
def test_tool_calls(call: str) -> None:
    reasoning, content, calls = taken_apart(
        [f"<think>\nlook\n</think>\n\nLet me see.\n{call}\n{call}"], tools=TOOLS, reasoning=True
    )
    assert (reasoning, content) == ("look", "Let me see.")
    assert [name for name, _ in calls] == ["weather", "weather"]
    arguments = json.loads(calls[0][1])
    assert arguments["days"] == 3
    assert arguments["city"] == ('Köln {"x"}' if call == CALL else "Bad <b>Ems</b>")


@given(st.lists(st.integers(1, 9), max_size=60), st.sampled_from([CALL, XML_CALL]))
def test_the_pieces_in_which_it_comes_do_not_matter(sizes: list[int], call: str) -> None:
    text = f"<think>a\nb</think>\n\nSo: \n\n{call}\n{call} and <b>more</b>\n"
    chunks, rest = [], text
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    options: dict[str, Any] = {"tools": TOOLS, "reasoning": True}
    assert taken_apart([*chunks, rest], **options) == taken_apart([text], **options)


@given(st.text(alphabet='<>/tool_cahink{}":\\ \nx', max_size=80))
def test_nothing_breaks_it_and_plain_text_is_kept(text: str) -> None:
    whole = taken_apart([text], tools=TOOLS, reasoning=True)
    assert taken_apart(list(text), tools=TOOLS, reasoning=True) == whole
    assert taken_apart(list(text)) == ("", text, [])


def test_arguments_stream_as_they_come() -> None:
    parser = AnswerParser(tools=TOOLS)
    parts = [piece for char in CALL for piece in parser.feed(char)]
    assert isinstance(parts[0], CallPart) and parts[0].name == "weather"
    assert len(parts) > 20


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"arguments": {"city": "Ulm"}, "name": "weather"}', ("weather", '{"city": "Ulm"}')),
        ('{"name": "now"}', ("now", "{}")),
        ('{"name": "now", "arguments": null}', ("now", "{}")),
        ('{"name": "weather", "arguments": "{\\"city\\": 1}"}', ("weather", '{"city": 1}')),
        ('{"name": "weather", "parameters": {"city": "</tool_call>"}}', ("weather", '{"city": "</tool_call>"}')),
        ("<function=now>\n</function>", ("now", "{}")),
    ],
)
def test_other_ways_to_write_a_call(body: str, expected: tuple[str, str]) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert taken_apart([text], tools=TOOLS) == ("", "", [expected])
    assert taken_apart(list(text), tools=TOOLS) == ("", "", [expected])


def test_what_is_no_call_stays_text() -> None:
    for body in ("{not json}", "", '["name"]', '{"name": 5}'):
        text = f"see <tool_call>{body}</tool_call> there"
        reasoning, content, calls = taken_apart([text], tools=TOOLS)
        assert calls == [] and reasoning == ""
        assert body in content and content.startswith("see")


def test_a_call_that_is_cut_off() -> None:
    _, content, calls = taken_apart(['<tool_call>{"name": "weather", "arguments": {"city": "K'], tools=TOOLS)
    assert content == "" and calls == [("weather", '{"city": "K')]
    _, content, calls = taken_apart(['<tool_call>{"na'], tools=TOOLS)
    assert content == '<tool_call>{"na' and calls == []
    _, _, calls = taken_apart(['<tool_call>{"name": "now", "arguments": {}}'], tools=TOOLS)
    assert calls == [("now", "{}")]


def test_a_forced_call_has_no_tags() -> None:
    text = '{"name": "weather", "arguments": {"city": "Ulm"}}'
    assert taken_apart(list(text), tools=TOOLS, forced=True) == ("", "", [("weather", '{"city": "Ulm"}')])
    assert taken_apart(["{"], tools=TOOLS, forced=True) == ("", "{", [])
