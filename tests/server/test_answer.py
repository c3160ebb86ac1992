"""Answers taken apart: reasoning, content, tool calls, in whole and in any pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.checks import json_value
from forkpoint.server.answer import AnswerParser, CallPart, Content, Piece, Reasoning
from forkpoint.server.messages.endpoint import _whole_arguments
from forkpoint.server.sse import encode

TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
    "lamp": {"type": "object", "properties": {"on": {"type": "boolean"}}},
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
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.text)
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


@pytest.mark.parametrize("text", ["<think></think>\nyes\n</think>\n", "<think>\nhm</think>yes\n</think>\n"])
def test_what_follows_an_opened_thinking_stays_content(text: str) -> None:
    parser = AnswerParser(reasoning=True)
    parser.feed(text)
    parser.finish()
    assert parser.num_unopened == 0


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


@pytest.mark.parametrize("call", [CALL, XML_CALL])
def test_a_call_of_a_declared_function_is_reported_while_it_comes(call: str) -> None:
    parser = AnswerParser(tools=TOOLS)
    end = call.index("days")
    pieces = [piece for char in f"a {call[:end]}" for piece in parser.feed(char)]
    calls = [piece for piece in pieces if isinstance(piece, CallPart)]
    assert calls[0].name == "weather" and len(calls) > 5
    told = "".join(piece.text for piece in calls)
    assert told.startswith('{"city": "') and len(told) > 15


def test_a_call_of_another_function_is_reported_when_it_is_whole() -> None:
    parser = AnswerParser(tools=TOOLS)
    call = CALL.replace("weather", "other")
    pieces = [piece for char in f"a {call} b" for piece in parser.feed(char)] + parser.finish()
    calls = [piece for piece in pieces if isinstance(piece, CallPart)]
    assert [piece.name for piece in calls] == ["other"]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "ab"


def test_a_forced_call_streams_as_it_comes() -> None:
    parser = AnswerParser(tools=TOOLS, forced=True)
    text = '{"name": "weather", "arguments": {"city": "K}", "days": 3}}'
    parts = [piece for char in text for piece in parser.feed(char)]
    assert isinstance(parts[0], CallPart) and parts[0].name == "weather"
    assert len(parts) > 15


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"arguments": {"city": "Ulm"}, "name": "weather"}', ("weather", '{"city": "Ulm"}')),
        ('{"name": "now"}', ("now", "{}")),
        ('{"name": "now", "arguments": null}', ("now", "{}")),
        ('{"name": "weather", "arguments": "{\\"city\\": 1}"}', ("weather", '{"city": 1}')),
        ('{"name": "weather", "parameters": {"city": "</tool_call>"}}', ("weather", '{"city": "</tool_call>"}')),
        ("<function=now>\n</function>", ("now", "{}")),
        ("<function=lamp>\n<parameter=on>\nTrue\n</parameter>\n</function>", ("lamp", '{"on": true}')),
    ],
)
def test_other_ways_to_write_a_call(body: str, expected: tuple[str, str]) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert taken_apart([text], tools=TOOLS) == ("", "", [expected])
    assert taken_apart(list(text), tools=TOOLS) == ("", "", [expected])


BROKEN = [
    "{not json}",
    "",
    '["name"]',
    '{"name": 5}',
    '{"name": "f", "arguments": {"a": 1\n',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "[1]"}',
    '{"name": "f", "arguments": {"a": "never ends\n',
    '{"name": "f", "arguments": {"a": 1}}} and more',
    '{"name": "f", "arguments": {"a": 1]}',
    "{" * 2000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    "<function=f>\n<parameter=a>\n1\n",
    "<function=f>\nwhat",
    "<function=\n>",
    "<functions>",
]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_call_stays_text(body: str) -> None:
    for text in (
        f"see <tool_call>{body}</tool_call> there",
        f"see \n\n<tool_call>{body}\n</tool_call>\n<tool_call>{body}</tool_call>\n",
        f"<tool_call>{body}",
    ):
        assert taken_apart([text], tools=TOOLS) == ("", text, [])
        assert taken_apart(list(text), tools=TOOLS) == ("", text, [])


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_a_call_behind_a_broken_one_is_found(body: str) -> None:
    text = f"<tool_call>{body}\n</tool_call>\n{CALL}"
    expected = ("", f"<tool_call>{body}\n</tool_call>", [("weather", '{"city": "K\\u00f6ln {\\"x\\"}", "days": 3}')])
    assert taken_apart([text], tools=TOOLS) == expected
    assert taken_apart(list(text), tools=TOOLS) == expected


TOKENS = [*'<>{}[]":,\\ \nx1', "'", "{{", "}}", '"a": 1', '{"a":', "</tool_call>", "None"]


@given(
    st.sampled_from(["f", "now"]),
    st.lists(st.sampled_from(TOKENS), max_size=30),
    st.lists(st.integers(1, 9), max_size=60),
)
def test_what_is_told_as_a_call_is_json(name: str, tokens: list[str], sizes: list[int]) -> None:
    text = f'a\n<tool_call>{{"name": "{name}", "arguments": {{{"".join(tokens)}}}}}\n</tool_call>\nb'
    _, content, calls = taken_apart([text], tools=TOOLS)
    if not calls:
        assert content == text
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    chunks, rest = [], text
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    assert taken_apart([*chunks, rest], tools=TOOLS) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "closing"),
    [
        ('<tool_call>{"name": "weather", "arguments": {"city": "K', '"}'),
        ('<tool_call>{"name": "weather", "arguments": {"days": [1, {"a": 2', "}]}"),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nK", '"}'),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nK\n</parameter>\n", "}"),
    ],
)
def test_arguments_that_break_off_are_closed_unless_the_length_cut_them(text: str, closing: str) -> None:
    _, content, [(name, arguments)] = taken_apart(list(text), tools=TOOLS)
    assert (content, name) == ("", "weather") and isinstance(json.loads(arguments), dict)
    for chunks in ([text], list(text)):
        parser = AnswerParser(tools=TOOLS)
        pieces = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish(cut=True)
        told = "".join(piece.text for piece in pieces if isinstance(piece, CallPart))
        assert told + closing == arguments


def test_a_call_that_is_cut_off_before_it_is_certain_stays_text() -> None:
    for text in (
        '<tool_call>{"na',
        '<tool_call>{"name": "other", "arguments": {"city": "K',
        "<tool_call>\n<function=f>",
    ):
        assert taken_apart([text], tools=TOOLS) == ("", text, [])
    _, _, calls = taken_apart(['<tool_call>{"name": "now", "arguments": {}}'], tools=TOOLS)
    assert calls == [("now", "{}")]


def test_many_beginnings_of_calls_take_no_long_time_and_stay_text() -> None:
    opening = "<tool_call><function=f><parameter=x>"
    text = f"a {opening * 3000}\n"
    parser = AnswerParser(tools=TOOLS)
    pieces = parser.feed(text)
    started = time.process_time()
    pieces += parser.finish()
    elapsed = time.process_time() - started
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text
    started = time.process_time()
    taken_apart(["word " * (len(text) // 5)], tools=TOOLS)
    assert elapsed < 0.01 + 50 * (time.process_time() - started)  # it was 3000 times over the text
    assert taken_apart([f'{opening * 3} <tool_call>{{"name": "now"}}'], tools=TOOLS) == (
        "",
        opening * 3,
        [("now", "{}")],
    )


def test_a_single_call_ends_the_answer() -> None:
    parser = AnswerParser(tools=TOOLS, single=True)
    pieces = parser.feed(f"One:\n{CALL}\n{XML_CALL} and more")
    assert parser.done and parser.num_calls == 1
    assert [type(piece) for piece in pieces] == [Content, CallPart]
    assert parser.feed("more") == parser.finish() == []


def test_a_forced_call_has_no_tags() -> None:
    text = '{"name": "weather", "arguments": {"city": "Ulm"}}'
    assert taken_apart(list(text), tools=TOOLS, forced=True) == ("", "", [("weather", '{"city": "Ulm"}')])


def test_a_forced_call_that_is_cut_off_is_a_call_or_nothing() -> None:
    assert taken_apart(['{ \n "na'], tools=TOOLS, forced=True) == ("", "", [])
    text = '{"name": "weather", "arguments": {"city": "U'
    assert taken_apart(list(text), tools=TOOLS, forced=True) == ("", "", [("weather", '{"city": "U')])


def test_a_half_of_a_surrogate_pair_fails_no_answer() -> None:
    """JSON can escape it, and models write such JSON, but it has no bytes."""
    arguments = r'{"a": "\ud83d", "b": ["\ud83d\ude00"], "\ude00": 1}'
    assert json_value(arguments) == {"a": "\ufffd", "b": ["\U0001f600"], "\ufffd": 1}
    assert encode(_whole_arguments(arguments)) and json_value(r'"\\ud83d"') == r"\ud83d"
