"""response_format, structured_outputs and forced tool calls: what the grammar promises arrives."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from tests.server.running import RunningServer

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"]}
SCHEMA["additionalProperties"] = False
NO_SPACES = {str(byte): -100 for byte in b" \n\r\t"}  # a random model would write them for ever
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("forecast", "history")
]
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Weather?"}],
    "max_tokens": 100,
    "logit_bias": NO_SPACES,
}


def test_a_choice(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(model="tiny", prompt="Yes or no?", max_tokens=8, extra_body=extra)
    assert answer.choices[0].text in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"


def test_a_json_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(response_format=wanted, **ASK)
    assert json.loads(str(answer.choices[0].message.content)) in ({"ok": True}, {"ok": False})


def test_json_objects(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **ASK)
    choice = answer.choices[0]
    assert str(choice.message.content).lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(str(choice.message.content)), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "history"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer: Any = client.chat.completions.create(tools=TOOLS, tool_choice=choice, stream=stream, **ASK)
    if stream:
        chunks = [choice for chunk in answer for choice in chunk.choices]
        parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
        name, arguments = parts[0].function.name, "".join(part.function.arguments for part in parts)
        assert parts[0].id and {part.index for part in parts} == {0}
        reason = chunks[-1].finish_reason
        assert not any(chunk.delta.content for chunk in chunks)
    else:
        call = answer.choices[0].message.tool_calls[0]
        name, arguments, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert reason == ("stop" if isinstance(choice, dict) else "tool_calls")  # as OpenAI has it
    assert name == "history" if isinstance(choice, dict) else name in ("forecast", "history")
    values = json.loads(arguments)
    assert values in ({"days": 1}, {"days": 2}, {"days": 3})


def test_a_call_and_its_result_can_be_told(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "forecast", "arguments": '{"days": 1}'}}
    messages: list[Any] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS[:1], max_tokens=4)
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"structured_outputs": {"regexp": "x"}}, "regexp"),
        ({"structured_outputs": {"choise": ["x"], "disable_any_whitespace": True}}, "choise"),
        ({"structured_outputs": {"regex": "x", "choice": ["x"]}}, "exactly one"),
        ({"structured_outputs": {"regex": "x"}, "response_format": {"type": "json_object"}}, "exclude"),
        ({"structured_outputs": {"regex": "(((("}}, "regular expression"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "nope"),
        ({"tool_choice": "required"}, "no tools"),
    ],
)
def test_contradictions_are_refused(client: openai.OpenAI, extra: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(extra_body=extra, **ASK)


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_format_that_is_not_strict_is_enforced_as_far_as_possible(
    client: openai.OpenAI, server: RunningServer, strict: bool | None
) -> None:
    """OpenAI's servers refuse such keywords in strict schemas alone. pydantic writes this one for a set."""
    days = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    schema = {"type": "object", "properties": {"days": days}, "required": ["days"], "additionalProperties": False}
    form: Any = {"name": "answer", "schema": schema}
    form |= {} if strict is None else {"strict": strict}

    def chat() -> str:
        asked: Any = {"type": "json_schema", "json_schema": form}
        return str(client.chat.completions.create(response_format=asked, **ASK).choices[0].message.content)

    def response() -> str:
        asked: Any = {"format": {"type": "json_schema", **form}}
        return client.responses.create(model="tiny", input="Weather?", text=asked, temperature=0).output_text

    for ask in (chat, response):
        if strict:
            with pytest.raises(openai.BadRequestError, match="'uniqueItems' at /properties/days"):
                ask()
        else:
            assert json.loads(ask()) == {"days": [1, 1]}
            assert "not strict may not match the whole schema: the JSON schema uses 'uniqueItems'" in server.log


def test_every_place_of_a_format_is_read_for_what_is_strict(http: httpx2.Client) -> None:
    days = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    form = {"name": "answer", "schema": days}

    def status(**fields: Any) -> int:
        return http.post("/v1/chat/completions", json={**ASK, **fields}).status_code

    for kind in ("json_schema", "json_object"):
        assert status(response_format={"type": kind, "schema": days}) == 200
        assert status(response_format={"type": kind, "schema": days, "strict": True}) == 400
    assert status(response_format={"type": "json_schema", "json_schema": {**form, "strict": "true"}}) == 400
    unused = {"type": "text", "json_schema": form}
    assert status(response_format=unused, guided_choice=["x"]) == 200
    assert status(response_format=unused, guided_json=days) == 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
        ),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}}),
    ],
)
def test_a_wrong_schema_is_called_the_same_in_each_api(http: httpx2.Client, path: str, fields: dict[str, Any]) -> None:
    """Each has a field of its own for it."""
    talk = {"input": "x"} if path == "/v1/responses" else {"messages": ASK["messages"], "max_tokens": 4}
    reply = http.post(path, json={"model": "tiny", **talk, **fields})
    assert reply.status_code == 400
    said = "the JSON schema uses 'type' at /, which cannot be enforced: Invalid type: objekt"
    assert reply.json()["error"]["message"] == said
