"""Tool calls through the official client. `structured_outputs` makes a random model write what is to be read."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from forkpoint.server.calls.schema_types import moved

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"]}
PARAMETERS["additionalProperties"] = False
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("forecast", "history")
]
SHORT: list[Any] = [{"type": "function", "function": {"name": "forecast"}}]  # leaves room in a short context
MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "forecast", "arguments": {"days": 1}}\n</tool_call>'
BROKEN = '<tool_call>{"name":"other","arguments":{"days":1\n</tool_call>'
OPEN = '<tool_call>{"name":"forecast","arguments":{"days":1\n</tool_call>'
NO_SPACES = {str(byte): -100 for byte in b" \n\r\t"}


def exactly(text: str) -> str:
    return "".join(f"[{char}]" if char in ".{}[]()*+?|" else char.replace("\n", "\\n") for char in text)


def say(client: openai.OpenAI, text: str, stream: bool, **fields: Any) -> tuple[str, list[Any], str, int]:
    """(content, [(name, arguments)], finish reason, completion tokens) of an answer with this text."""
    extra = {"structured_outputs": {"regex": exactly(text)}}
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": SHORT, "max_tokens": 350, **fields}
    answer: Any = client.chat.completions.create(**options, extra_body=extra, stream=False)
    choice = answer.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    whole = choice.message.content or "", calls, choice.finish_reason, answer.usage.completion_tokens
    if not stream:
        return whole
    options["stream_options"] = {"include_usage": True}
    chunks = list(client.chat.completions.create(**options, extra_body=extra, stream=True))
    parts = [choice for chunk in chunks for choice in chunk.choices]
    told: list[Any] = []
    for call in [call for part in parts for call in part.delta.tool_calls or ()]:
        if call.function.name is not None:
            told.append((call.function.name, ""))
        told[-1] = (told[-1][0], told[-1][1] + (call.function.arguments or ""))
    reasons = [part.finish_reason for part in parts if part.finish_reason is not None]
    assert len(reasons) == 1
    return "".join(part.delta.content or "" for part in parts), told, reasons[0], chunks[-1].usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_call_of_another_function_stays_text(client: openai.OpenAI, stream: bool) -> None:
    text = f"So:\n{BROKEN}\n{BROKEN} ."
    assert say(client, text, stream)[:3] == (text, [], "stop")
    content, calls, reason, _ = say(client, f"{BROKEN}\n{CALL}", stream)
    assert (content, calls, reason) == (BROKEN, [("forecast", '{"days": 1}')], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_call_of_a_declared_function_is_closed(client: openai.OpenAI, stream: bool) -> None:
    content, calls, reason, _ = say(client, f"{OPEN}\n{CALL}", stream)
    assert content == "" and reason == "tool_calls"
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("forecast", {"days": 1})] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_most(client: openai.OpenAI, stream: bool) -> None:
    call = ("forecast", '{"days": 1}')
    text = f"So:\n{CALL}\n{CALL}{'.' * 60}"
    both = say(client, text, stream)
    assert both[:3] == ("So:" + "." * 60, [call, call], "tool_calls")
    one = say(client, text, stream, parallel_tool_calls=False)
    assert one[:3] == ("So:", [call], "tool_calls")
    assert one[3] < both[3] - 50  # what is not told is not generated


def test_one_call_at_most_in_each_of_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=SHORT,
        n=3,
        parallel_tool_calls=False,
        extra_body={"structured_outputs": {"regex": exactly(f"{CALL}\n{CALL}")}},
    )
    assert [len(choice.message.tool_calls or ()) for choice in answer.choices] == [1, 1, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 25, 38])
def test_a_forced_call_that_is_cut_off_is_no_content(client: openai.OpenAI, stream: bool, max_tokens: int) -> None:
    answer: Any = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=max_tokens,
        stream=stream,
        logit_bias=NO_SPACES,
    )
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    told = [choice.delta if stream else choice.message for choice in choices]
    assert not any(one.content for one in told)
    assert choices[-1].finish_reason == "length"
    calls = [call for one in told for call in one.tool_calls or ()]
    assert bool(calls) == (max_tokens > 30)
    if calls:
        arguments = "".join(call.function.arguments for call in calls)
        assert calls[0].function.name in ("forecast", "history") and '{"days":1}'.startswith(arguments[:8])


ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "history"}}]},
}


@pytest.mark.parametrize("choice", [ALLOWED, ALLOWED["allowed_tools"]["tools"][0]])
def test_the_tools_that_are_allowed(client: openai.OpenAI, choice: Any) -> None:
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, logit_bias=NO_SPACES, max_tokens=100
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "history" and json.loads(call.function.arguments)["days"] in (1, 2, 3)
    assert answer.choices[0].finish_reason == ("tool_calls" if choice is ALLOWED else "stop")


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("names", [["f"], ["g"], ["f", "g"]])
def test_parameters_of_forced_calls_may_refer_to_parts_of_themselves(
    client: openai.OpenAI, names: list[str], has_ids: bool
) -> None:
    """Pydantic writes nested models so. Parts of two functions may have the same name, and schemas an id."""
    digits = {"f": [1, 2], "g": [3, 4]}
    tools: list[Any] = []
    for name in names:
        one = {"$defs": {"D": {"enum": digits[name]}}, "properties": {"a": {"$ref": "#/$defs/D"}}, "required": ["a"]}
        one |= {"$id": f"https://x/{name}"} if has_ids else {}
        tools.append({"type": "function", "function": {"name": name, "parameters": one}})
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=200, logit_bias=NO_SPACES
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name in names and json.loads(call.function.arguments)["a"] in digits[call.function.name]


def test_only_references_of_a_moved_schema_change() -> None:
    value = {"$ref": "#/a"}
    names = {"$ref": {"const": value, "items": {"$ref": "#"}}, "const": {"$ref": "#/$defs/x~1y"}, "$id": {"not": value}}
    alone = [{"$ref": "http://x"}, {"$id": "http://x", "items": value}]
    assert moved({"properties": names, "enum": [value], "allOf": alone}, "/p/0") == {
        "properties": {
            "$ref": {"const": value, "items": {"$ref": "#/p/0"}},
            "const": {"$ref": "#/p/0/$defs/x~1y"},
            "$id": {"not": {"$ref": "#/p/0/a"}},
        },
        "enum": [value],
        "allOf": alone,
    }


@pytest.mark.parametrize("place", ["#", "#/$defs/node"])
def test_parameters_of_forced_calls_may_be_recursive(client: openai.OpenAI, place: str) -> None:
    node: dict[str, Any] = {"type": "object", "required": ["n"], "additionalProperties": False}
    node["properties"] = {"n": {"type": "array", "items": {"$ref": place}, "maxItems": 1}}
    parameters = node if place == "#" else {"$defs": {"node": node}, "$ref": place}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer: Any = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=tools,
        tool_choice="required",
        max_tokens=100,
        logit_bias={str(ord("]")): -100},
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.arguments.startswith('{"n": [{"n": [{"n": [')


def test_tools_that_are_not_allowed_are_not_shown(client: openai.OpenAI) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {**ALLOWED["allowed_tools"], "mode": "auto"}}

    def num_prompt_tokens(**fields: Any) -> int:
        answer: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, **fields)
        return int(answer.usage.prompt_tokens)

    assert num_prompt_tokens(tools=TOOLS, tool_choice=choice) == num_prompt_tokens(tools=TOOLS[1:])


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "computer", "name": "x"}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "custom": {"description": "x"}}]}, "tools.0.custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "description": 5}}]}, "tools.0.custom.description"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "the parameters of 'f' have type 'array'; give a schema of type 'object'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}]},
            "tools is nested more",
        ),
        ({"chat_template_kwargs": nested(900)}, "chat_template_kwargs is nested more than 64"),
        ({"messages": [{"role": "user", "content": "x", "extra": nested(900)}]}, "messages is nested more than 64"),
        ({"tools": TOOLS, "tool_choice": {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"functions": [{"name": "f", "parameters": nested(900)}]}, "functions is nested more"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "needs a function"),
    ],
)
def test_what_is_not_understood_is_said(http: httpx2.Client, fields: dict[str, Any], said: str) -> None:
    reply = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2, **fields})
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


def test_answers_can_be_sent_back_as_they_came(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "forecast", "arguments": '{"days": 1}'}}
    empty = {"tool_calls": [], "refusal": None, "annotations": [], "audio": None, "function_call": None}
    written = (
        '<tool_call>\n{"name": "forecast", "arguments": {"days": 1}}\n</tool_call>'  # for a template without calls
    )
    for answer in (
        {"content": None},
        {"content": None, **empty},
        {"content": None, "reasoning_content": "hm", "reasoning": "hm"},
        {"content": None, "refusal": "I will not"},
        {"content": [{"type": "refusal", "refusal": "I will not"}]},
        {"content": None, "tool_calls": [call]},
        {"tool_calls": [call]},
        {},
    ):
        messages: list[Any] = [*MESSAGES, {"role": "assistant", **answer}, {"role": "user", "content": "Go on"}]
        told: Any = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        said = "I will not" if "I will not" in str(answer) else written if answer.get("tool_calls") else ""
        plain: list[Any] = [*MESSAGES, {"role": "assistant", "content": said}, messages[-1]]
        same: Any = client.chat.completions.create(model="tiny", messages=plain, max_tokens=1)
        assert told.usage.prompt_tokens == same.usage.prompt_tokens
