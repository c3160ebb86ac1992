"""Errors of wrong values say which value was given, and what is allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from forkpoint.server.body import parse
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.completions.body import CompletionBody
from forkpoint.server.errors import HTTPError
from forkpoint.server.responses.body import ResponsesBody
from forkpoint.server.responses.input_items import ItemsQuery
from forkpoint.server.wrong_values import ALLOWED, MISSING

CHAT = {"messages": [{"role": "user", "content": "x"}]}
CASES: list[tuple[Any, Any, str]] = [
    (ChatBody, [], "the body [] is not allowed; give an object"),
    (ChatBody, {}, "messages is missing; give it"),
    (ChatBody, {"messages": "x"}, "messages='x' is not allowed; give a list"),
    (ChatBody, {"messages": []}, "messages=[] is not allowed; give a list with a length of at least 1"),
    (ChatBody, {"messages": [{"content": "x"}]}, "messages.0.role is missing; give it"),
    (ChatBody, {**CHAT, "temperature": -1}, "temperature=-1 is not allowed; give a number of at least 0"),
    (ChatBody, {**CHAT, "temperature": "hot"}, "temperature='hot' is not allowed; give a number"),
    (ChatBody, {**CHAT, "top_p": -1}, "top_p=-1 is not allowed; give a number above 0"),
    (ChatBody, {**CHAT, "top_p": 1.5}, "top_p=1.5 is not allowed; give a number of at most 1"),
    (ChatBody, {**CHAT, "seed": 2**64}, f"seed={2**64} is not allowed; give a number below {2**64}"),
    (ChatBody, {**CHAT, "max_tokens": 1.5}, "max_tokens=1.5 is not allowed; give an integer"),
    (ChatBody, {**CHAT, "max_tokens": "x"}, "max_tokens='x' is not allowed; give an integer"),
    (ChatBody, {**CHAT, "stream": 5}, "stream=5 is not allowed; give true or false"),
    (
        ChatBody,
        {**CHAT, "bad_words": ["a", ""]},
        "bad_words.1='' is not allowed; give a string with a length of at least 1",
    ),
    (ChatBody, {**CHAT, "tool_choice": "some"}, "give 'none', 'auto' or 'required', or an object"),
    (
        ChatBody,
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content=5 is not allowed; give a string, or a",
    ),
    (
        ChatBody,
        {"messages": [*CHAT["messages"], {"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]},
        "messages.1.content.1='y' is not allowed; give an object",
    ),
    (ChatBody, {**CHAT, "tool_choice": {"type": "function"}}, "tool_choice.function is missing; give it"),
    (ChatBody, {**CHAT, "chat_template_kwargs": 1}, "chat_template_kwargs=1 is not allowed; give an object"),
    (ChatBody, {**CHAT, "stop_token_ids": [1] * 5000}, "give a list with a length of at most 4096"),
    (ChatBody, {**CHAT, "request_id": "a b"}, "request_id='a b' is not allowed; give a string that matches ^[!-~]+$"),
    (ChatBody, {**CHAT, "request_id": "a" * 200}, "give a string with a length of at most 128"),
    (ChatBody, {**CHAT, "logit_bias": {str(i): 1 for i in range(2000)}}, "is not allowed; give at most 1024 entries"),
    (CompletionBody, {"prompt": ["a", 3]}, "prompt.1=3 is not allowed; give a string"),
    (ItemsQuery, {"limit": "x"}, "limit='x' is not allowed; give an integer"),
    (ResponsesBody, {"input": "x", "text": {"format": {"type": "x"}}}, "text.format.type='x' is not allowed; give 't"),
]


@pytest.mark.parametrize(("model", "body", "said"), CASES)
def test_what_is_given_and_what_is_allowed(model: Any, body: Any, said: str) -> None:
    with pytest.raises(HTTPError) as refused:
        parse(model, json.dumps(body).encode())
    assert said in refused.value.message and refused.value.status == 400
    if body:
        assert refused.value.message.startswith(str(refused.value.param))


def test_each_kind_of_error_has_a_case() -> None:
    kinds = set()
    for model, body, _ in CASES:
        with pytest.raises(ValidationError) as found:
            model.model_validate(body)
        kinds |= {error["type"] for error in found.value.errors()}
    assert kinds == {MISSING, *ALLOWED}
