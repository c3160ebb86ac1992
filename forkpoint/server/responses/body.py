"""Bodies of OpenAI's Responses API, and what they ask in the terms of a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Literal

from pydantic import Field

from forkpoint.server.chat_body import ChatBody
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import Body, Many, MaxTokens
from forkpoint.server.sampling import SampledBody


class FunctionTool(Body):
    """Tools of other types, which OpenAI's servers run, are refused."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[NamedTool] = Field(min_length=1)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(None, description="say in the instructions how long texts should be")


class ReasoningOptions(Body):
    """`effort` reaches the chat template; `summary` is accepted, and reasoning is told as it is."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(SampledBody, apis=("responses",)):
    """Answer a conversation, which may go on from a stored response. `background` answers at once and goes on."""

    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Many[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Many[str] | None = Field(None, description="what this server does not make is not there")
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None


def input_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Raises HTTPError naming what is not understood."""
    return [{"role": "user", "content": body.input}] if isinstance(body.input, str) else messages_of(body.input)


def chat_fields(body: ResponsesBody, conversation: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of the chat completion that `body` asks for. Raises HTTPError naming what is not understood.

    `conversation` has the messages of `body`, and before them those of the response that it goes on from.
    """
    told = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields: dict[str, Any] = {
        **{name: getattr(body, name) for name in ResponsesBody.model_fields.keys() & ChatBody.model_fields.keys()},
        "messages": _one_system_message([*told, *conversation]),
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": _choice(body.tool_choice),
    }
    if "message.output_text.logprobs" in (body.include or ()):
        raise HTTPError(400, "log-probabilities are told by /v1/chat/completions alone", param="include")
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if not fields["messages"]:
        raise HTTPError(400, "input is empty; give a text or at least one item", param="input")
    return {name: value for name, value in fields.items() if value is not None}


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages: reasoning, text and calls that follow each other are one message of the assistant.

    Raises HTTPError for items that only OpenAI's servers know.
    """
    told: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        match kind:
            case "message":
                _add_message(told, item)
            case "reasoning":
                _last_answer(told, after=("content", "tool_calls"))["reasoning_content"] = _reasoning(item)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                _last_answer(told).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _content(item.get("output"))
                told.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case _:
                raise HTTPError(
                    400,
                    f"items of the type {kind!r} are not understood; give message, reasoning, function_call and "
                    "function_call_output",
                    param="input",
                )
    return told


def _add_message(told: list[dict[str, Any]], item: dict[str, Any]) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise HTTPError(400, f"a message has role user, assistant, system or developer; given {role!r}", param="input")
    content = _content(item.get("content"))
    if role == "assistant":
        _last_answer(told, after=("content", "tool_calls"))["content"] = content
    else:
        told.append({"role": "system" if role == "developer" else role, "content": content})


def _last_answer(told: list[dict[str, Any]], after: Sequence[str] = ()) -> dict[str, Any]:
    """The assistant's message that is being told; a new one where the last has any of `after`."""
    if not told or told[-1]["role"] != "assistant" or any(name in told[-1] for name in after):
        told.append({"role": "assistant"})
    return told[-1]


def _content(content: Any) -> Any:
    """A text, or parts of the kinds that a conversation can have; what is wrong with them is said there."""
    if isinstance(content, str | list):
        return content
    raise HTTPError(400, "an item's content, or its output, is a text or a list of text parts", param="input")


def _reasoning(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def echo(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request, all that the official client expects to be there."""
    dumped = body.model_dump(exclude_none=True, by_alias=True, include={"metadata", "text", "reasoning", "tool_choice"})
    tools = [
        {"description": None, "parameters": None, "strict": None, **tool.model_dump(exclude_none=True)}
        for tool in body.tools or ()
    ]
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
        **dumped,
        "background": bool(body.background),
        "tools": tools,
    }


def _one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Many templates take one, at the beginning: instructions and what follows them become one text."""
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(leading) < 2:
        return messages
    parts: list[Any] = []
    for message in leading:
        content = message["content"]
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [{"role": "system", "content": parts}, *messages[len(leading) :]]


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
    return {"type": "function", "function": function}


def _choice(choice: str | NamedTool | AllowedTools | None) -> Any:
    match choice:
        case NamedTool():
            return {"type": "function", "function": {"name": choice.name}}
        case AllowedTools():
            tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise HTTPError(400, "text.format of the type json_schema needs schema", param="text.format")
    return {"type": "json_schema", "json_schema": {"name": given.name or "answer", "schema": given.schema_}}
