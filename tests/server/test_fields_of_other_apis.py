"""Fields that belong to another API of this server are read under their own name, or refused; never ignored."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {}}


def ask(http: httpx2.Client, path: str, **fields: Any) -> httpx2.Response:
    given: dict[str, Any] = {
        TEXT: {"prompt": "hello"},
        RESPONSES: {"input": "hello"},
    }.get(path, {"messages": [{"role": "user", "content": "hello"}]})
    return http.post(path, json={**given, **fields})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_output_tokens"),
        (TEXT, "max_output_tokens"),
        (RESPONSES, "max_tokens"),
        (RESPONSES, "max_completion_tokens"),
        (MESSAGES, "max_completion_tokens"),
        (MESSAGES, "max_output_tokens"),
    ],
)
def test_a_limit_may_have_the_name_of_another_api(http: httpx2.Client, path: str, name: str) -> None:
    usage = ask(http, path, **{name: 1}).json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 1


@pytest.mark.parametrize(
    ("path", "name", "limit"),
    [
        (CHAT, "stop_sequences", "max_tokens"),
        (TEXT, "stop_sequences", "max_tokens"),
        (RESPONSES, "stop_sequences", "max_output_tokens"),
        (MESSAGES, "stop", "max_tokens"),
    ],
)
def test_stop_strings_may_have_the_name_of_another_api(http: httpx2.Client, path: str, name: str, limit: str) -> None:
    def said(**fields: Any) -> str:
        reply = ask(http, path, **{limit: 30, "temperature": 0}, **fields).json()
        if path in (CHAT, TEXT):
            choice = reply["choices"][0]
            return str(choice["text"] if path == TEXT else choice["message"]["content"])
        parts = reply["content"] if path == MESSAGES else reply["output"][0]["content"]
        return "".join(part["text"] for part in parts)

    whole = said()
    stop = whole[5:8]
    for given in (stop, [stop]):
        assert said(**{name: given}) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (CHAT, {"system": "Be brief."}, "into the messages"),
        (CHAT, {"instructions": "Be brief."}, "into the messages"),
        (CHAT, {"previous_response_id": "resp_1"}, "send the whole conversation"),
        (CHAT, {"text": {"format": {"type": "json_object"}}}, "give response_format"),
        (CHAT, {"output_config": {"format": SCHEMA}}, "give response_format"),
        (CHAT, {"background": True}, "ask /v1/responses"),
        (TEXT, {"tools": [{"type": "function", "function": FUNCTION}]}, "ask /v1/chat/completions"),
        (TEXT, {"top_logprobs": 2}, "as logprobs"),
        (RESPONSES, {"n": 2}, "ask /v1/chat/completions"),
        (RESPONSES, {"logprobs": True}, "include with message.output_text.logprobs"),
        (RESPONSES, {"response_format": SCHEMA}, "give text.format"),
        (RESPONSES, {"functions": [FUNCTION]}, "give tools"),
        (RESPONSES, {"system": "Be brief."}, "give instructions"),
        (RESPONSES, {"guided_regex": "a"}, "give structured_outputs"),
        (RESPONSES, {"bad_words": ["a"]}, "ask /v1/chat/completions"),
        (MESSAGES, {"n": 2}, "ask /v1/chat/completions"),
        (MESSAGES, {"response_format": SCHEMA}, "give output_config.format"),
        (MESSAGES, {"functions": [FUNCTION]}, "give tools"),
        (MESSAGES, {"logprobs": True, "top_logprobs": 2}, "ask /v1/chat/completions"),
        (MESSAGES, {"seed": 7}, "ask /v1/chat/completions"),
        (MESSAGES, {"parallel_tool_calls": False}, "disable_parallel_tool_use"),
        (MESSAGES, {"instructions": "Be brief."}, "give system"),
    ],
)
def test_a_field_of_another_api_is_refused(http: httpx2.Client, path: str, fields: dict[str, Any], said: str) -> None:
    reply = ask(http, path, **fields, **({"max_tokens": 3} if path != RESPONSES else {"max_output_tokens": 3}))
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"system": "", "instructions": "", "background": False, "text": {"format": {"type": "text"}}}),
        (TEXT, {"tools": [], "functions": [], "top_logprobs": 0}),
        (RESPONSES, {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "functions": [], "system": None}),
        (MESSAGES, {"n": 1, "seed": -1, "presence_penalty": 0.0, "parallel_tool_calls": True, "logit_bias": {}}),
    ],
)
def test_fields_of_other_apis_may_ask_for_nothing(http: httpx2.Client, path: str, fields: dict[str, Any]) -> None:
    reply = ask(http, path, **fields, **({"max_tokens": 3} if path != RESPONSES else {"max_output_tokens": 3}))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "choice",
    [{"type": "any"}, {"type": "required"}, {"type": "function", "name": "f"}, {"name": "f"}],
)
@pytest.mark.parametrize("schema", ["parameters", "input_schema"])
def test_tools_of_chats_may_be_flat(http: httpx2.Client, choice: Any, schema: str) -> None:
    """Cursor sends them in this form, and its choice as an object."""
    parameters = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    flat = {"name": "f", "description": "Do it.", schema: parameters}
    nested = {"type": "function", "function": {"name": "f", "description": "Do it.", "parameters": parameters}}
    fields = {"return_token_ids": True}
    same = ask(http, CHAT, tools=[nested], tool_choice="required", **fields, max_tokens=1).json()
    reply = ask(http, CHAT, tools=[{"type": "function", **flat}], tool_choice=choice, **fields, max_tokens=60).json()
    assert reply["prompt_token_ids"] == same["prompt_token_ids"]
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 7}'}
    for free in ("auto", "none"):
        texts = [
            ask(http, CHAT, tools=[flat], tool_choice=given, **fields, max_tokens=1).json()["prompt_token_ids"]
            for given in (free, {"type": free})
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_extra_body_is_a_word_of_the_python_client(http: httpx2.Client, path: str) -> None:
    """Clients in other languages send it as it is, and its fields would have no effect."""
    reply = ask(http, path, max_tokens=3, extra_body={"top_k": 1})
    assert reply.status_code == 400 and "in the request itself" in reply.json()["error"]["message"], reply.text
    assert ask(http, path, max_tokens=3, extra_body={}).status_code == 200
