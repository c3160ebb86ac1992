"""OpenAI's custom tools in chats: the model writes a free text, and the client gets it as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, cast

import httpx2
import openai
import pytest

from forkpoint.server.answer import CallPart, Content, Piece
from forkpoint.server.body import validated
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.chat.tools import customs_of, plan_tools
from forkpoint.server.custom_tools import CustomCalls, custom_input
from tests.server.test_tool_calls import MESSAGES, SHORT, exactly

RUN: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Runs code."}}
WRITTEN = '<tool_call>\n{"name": "run", "arguments": {"input": "print(\\"a\\")\\n"}}\n</tool_call>'
CODE = 'print("a")\n'


def with_grammar(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {**RUN["custom"], "format": form}}


def calls_of(client: openai.OpenAI, stream: bool, **fields: Any) -> Iterator[dict[str, Any]]:
    """The calls of an answer, each with all of its text."""
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, **fields}
    if not stream:
        answer: Any = client.chat.completions.create(**options)
        yield from (call.model_dump(exclude_none=True) for call in answer.choices[0].message.tool_calls)
        return
    calls: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            new = part.model_dump(exclude_unset=True)
            kind = "custom" if "custom" in new else "function"
            known = calls.setdefault(new.pop("index"), {"id": "", **new, kind: {}})
            for name, text in new[kind].items():
                known[kind][name] = known[kind].get(name, "") + text
    yield from calls.values()


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_custom_tools_have_their_text(client: openai.OpenAI, stream: bool) -> None:
    function = '<tool_call>\n{"name": "forecast", "arguments": {"days": 1}}\n</tool_call>'
    regex = {"structured_outputs": {"regex": exactly(f"{WRITTEN}\n{function}\n{WRITTEN}")}}
    calls = list(calls_of(client, stream, tools=[RUN, *SHORT], extra_body=regex))
    assert [call.pop("id")[:5] for call in calls] == ["call_"] * 3
    custom = {"type": "custom", "custom": {"name": "run", "input": CODE}}
    assert calls == [
        custom,
        {"type": "function", "function": {"name": "forecast", "arguments": '{"days": 1}'}},
        custom,
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "run"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_matches_the_regular_expression(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    tool = with_grammar("regex", 'a"[bc]{3}')
    [call] = calls_of(client, stream, tools=[tool], tool_choice=choice)
    assert call["type"] == "custom" and set(call["custom"]["input"][2:]) <= {"b", "c"}
    assert call["custom"]["input"][:2] == 'a"' and len(call["custom"]["input"]) == 5


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "run"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_matches_the_lark_grammar(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    tool = with_grammar("lark", 'start: "{\\"input\\": [" WORD "]\\n"\nWORD: /[xy]{4}/')
    [call] = calls_of(client, stream, tools=[tool], tool_choice=choice)
    assert call["type"] == "custom" and call["custom"]["name"] == "run"
    assert re.fullmatch(r'\{"input": \[[xy]{4}\]\n', call["custom"]["input"])


def test_a_forced_call_in_responses_matches_the_lark_grammar(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "custom",
        "name": "run",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[xy]{4}/"},
    }
    fields: dict[str, Any] = {
        "model": "tiny",
        "input": "x",
        "tools": [tool],
        "tool_choice": {"type": "custom", "name": "run"},
    }
    [item] = client.responses.create(**fields).output
    assert item.type == "custom_tool_call" and re.fullmatch("[xy]{4}", item.input)
    events = list(client.responses.create(**fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert re.fullmatch("[xy]{4}", "".join(deltas))


def test_a_conversation_goes_on_after_the_call_of_a_custom_tool(http: httpx2.Client) -> None:
    def num_tokens(call: dict[str, Any]) -> int:
        answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", **call}]}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "a"}
        body = {"messages": [*MESSAGES, answer, result], "tools": [RUN], "max_tokens": 1}
        return int(http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    function = {"name": "run", "arguments": {"input": CODE}}
    custom = {"type": "custom", "custom": {"name": "run", "input": CODE}}
    assert num_tokens(custom) == num_tokens({"type": "function", "function": function})


def test_the_model_sees_a_function_with_the_grammar() -> None:
    body = validated(ChatBody, {"messages": MESSAGES, "tools": [with_grammar("lark", 'start: "x"')]})
    [shown] = plan_tools(cast(Any, None), body).shown or ()
    assert shown["type"] == "function" and shown.keys() == {"type", "function"}
    assert shown["function"]["description"] == 'Runs code.\n\ninput follows this lark grammar:\nstart: "x"'
    assert customs_of(body) == {"run"}


def test_tools_may_be_flat() -> None:
    tools = [{"type": "custom", "name": "run"}, {"type": "custom", "name": "f", "input_schema": {"type": "object"}}]
    body = validated(ChatBody, {"messages": MESSAGES, "tools": tools})
    assert [tool.custom is not None for tool in body.tools or ()] == [True, False]


def test_text_between_calls_keeps_its_place() -> None:
    calls = CustomCalls({"run"})
    pieces: list[Piece] = [CallPart(0, "run", '{"in'), CallPart(0, None, 'put": "a"}'), Content("b")]
    assert calls.pieces(pieces[:1], is_last=False) == [CallPart(0, "run", "")]
    assert calls.pieces(pieces[1:], is_last=False) == [CallPart(0, None, "a"), Content("b")]
    assert calls.pieces([CallPart(1, "run", '{"input": "a')], is_last=True)[-1] == CallPart(1, None, "a")


def test_arguments_of_another_form_are_the_text() -> None:
    assert custom_input('{"input": "a"}') == "a"
    whole = json.dumps({"input": 'é "\\\n'})
    texts = [custom_input(whole[:length]) for length in range(len('{"input": "'), len(whole) + 1)]
    assert texts == sorted(texts) and {*texts} == {"", "é", "é ", 'é "', 'é "\\', 'é "\\\n'}
    others = ["print", '{"input": 1}', '{"x": "a"}']
    assert [custom_input(text) for text in others] == others
