"""OpenAI's older `functions` and `function_call`: answers are those to the same tools, in the older form."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.test_tool_calls import CALL, MESSAGES, PARAMETERS, TOOLS, exactly

FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
SHORT: list[Any] = [{"name": "forecast"}]  # leaves room in a short context
ARGUMENTS = '{"days": 1}'


def say(client: openai.OpenAI, text: str, stream: bool) -> tuple[str | None, Any, str]:
    """The content, the function call and the finish reason of an answer with this text."""
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "functions": SHORT, "max_tokens": 350}
    fields["extra_body"] = {"structured_outputs": {"regex": exactly(text)}}
    if not stream:
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.message.tool_calls is None
        call: Any = choice.message.function_call and choice.message.function_call.model_dump()
        return choice.message.content, call, choice.finish_reason
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert not any(part.delta.tool_calls for part in parts)
    pieces = [part.delta.function_call for part in parts if part.delta.function_call is not None]
    names = [piece.name for piece in pieces if piece.name is not None]
    called = None
    if names:
        called = {"arguments": "".join(piece.arguments or "" for piece in pieces), "name": "".join(names)}
    [reason] = [part.finish_reason for part in parts if part.finish_reason is not None]
    return "".join(part.delta.content or "" for part in parts) or None, called, reason


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_one_call(client: openai.OpenAI, stream: bool) -> None:
    called = {"arguments": ARGUMENTS, "name": "forecast"}
    assert say(client, f"{CALL}\n{CALL}", stream) == (None, called, "function_call")
    assert say(client, f"So:\n{CALL}", stream) == ("So:", called, "function_call")
    assert say(client, "It rains.", stream) == ("It rains.", None, "stop")


def test_a_choice_is_that_of_a_tool(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    answer = client.chat.completions.create(**fields, functions=FUNCTIONS, function_call={"name": "history"})
    tool: Any = {"type": "function", "function": {"name": "history"}}
    same = client.chat.completions.create(**fields, tools=TOOLS, tool_choice=tool)
    [wanted] = same.choices[0].message.tool_calls or ()
    called = answer.choices[0].message.function_call
    assert called is not None and wanted.type == "function"
    assert (called.name, called.arguments) == (wanted.function.name, wanted.function.arguments)
    assert answer.choices[0].finish_reason == "stop" and answer.usage is not None and same.usage is not None
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens
    unused = client.chat.completions.create(**fields, functions=FUNCTIONS, function_call="none")
    plain = client.chat.completions.create(**fields)
    assert unused.choices[0].message == plain.choices[0].message
    assert unused.usage is not None and plain.usage is not None
    assert unused.usage.prompt_tokens == plain.usage.prompt_tokens


def test_calls_and_results_can_be_sent_back(client: openai.OpenAI) -> None:
    """Those of two turns with one function."""
    older, newer = list[Any](MESSAGES), list[Any](MESSAGES)
    for turn in range(2):
        function = {"name": "forecast", "arguments": ARGUMENTS}
        older.append({"role": "assistant", "content": None, "function_call": function})
        older.append({"role": "function", "name": "forecast", "content": f"sun {turn}"})
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        newer.append({"role": "assistant", "content": None, "tool_calls": [call]})
        newer.append({"role": "tool", "tool_call_id": f"call_{turn}", "name": "forecast", "content": f"sun {turn}"})
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    answers = [client.chat.completions.create(**fields, messages=messages) for messages in (older, newer)]
    first, second = (answer.usage.prompt_tokens if answer.usage else 0 for answer in answers)
    assert first == second > 0
    assert answers[0].choices[0].message == answers[1].choices[0].message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"functions": SHORT, "tools": TOOLS}, "give one form"),
        ({"functions": SHORT, "tool_choice": "auto"}, "give one form"),
        ({"functions": SHORT, "function_call": {"name": "other"}}, "function_call names 'other'; the functions are"),
        ({"functions": SHORT, "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "forecast"}}, "give functions"),
        ({"functions": [{"parameters": PARAMETERS}]}, "functions.0.name is missing"),
    ],
)
def test_what_does_not_fit_together_is_said(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, **fields)
