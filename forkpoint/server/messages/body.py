"""Bodies of Anthropic's Messages API, and what they ask in the terms of a chat completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from forkpoint.server.chat_body import ChatBody
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import Body, Many, MaxTokens, RequestBody
from forkpoint.server.sampling import bounded


class InputMessage(Body):
    """`content` is a text, or blocks: text, thinking, tool_use, tool_result."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[dict[str, Any]]


class Tool(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = Field(None, description="custom; tools that Anthropic's servers run are refused")


class Thinking(Body):
    """`budget_tokens` is accepted and not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensBody(RequestBody, apis=("messages",)):
    """A conversation whose tokens are to be counted."""

    model: str | None = None
    messages: Many[InputMessage] = Field(min_length=1)
    system: str | Many[dict[str, Any]] | None = None
    tools: Many[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """Answer a conversation. Its messages' ends are breakpoints of the prefix cache, marked or not."""

    max_tokens: MaxTokens
    stop_sequences: Many[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k")

    @property
    def shows_thinking(self) -> bool:
        """Whether the client asked for it; one that did not may take the first block for the answer."""
        return self.thinking is not None and self.thinking.type != "disabled" and self.thinking.display != "omitted"


def chat_fields(body: CountTokensBody) -> dict[str, Any]:
    """The fields of the chat completion that `body` asks for. Raises HTTPError naming what is not understood."""
    system = _text(body.system, "system") if body.system else ""
    messages = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        messages += _messages(message)
    same = MessagesBody.model_fields.keys() & ChatBody.model_fields.keys()
    fields: dict[str, Any] = {name: getattr(body, name, None) for name in same}
    fields |= {"messages": messages, "tools": [_tool(tool) for tool in body.tools or ()], **_thinking(body)}
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    output_format = (body.output_config or {}).get("format") or body.output_format
    if output_format is not None:
        fields["response_format"] = _response_format(output_format)
    if body.messages[-1].role == "assistant":  # which begins the answer
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        fields |= {"include_reasoning": body.shows_thinking, "stop": body.stop_sequences}
    return {name: value for name, value in fields.items() if value is not None}


def _messages(message: InputMessage) -> list[dict[str, Any]]:
    """One message as chat templates know it: results of tools stand before what the user says beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    told: dict[str, Any] = {"role": message.role}
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    for block in message.content:
        kind = block.get("type")
        match message.role, kind:
            case _, "text":
                texts.append(_string(block, "text"))
            case "user", "tool_result":
                results.append(_result(block))
            case "assistant", "tool_use":
                told.setdefault("tool_calls", []).append(_call(block))
            case "assistant", "thinking":
                told["reasoning_content"] = told.get("reasoning_content", "") + _string(block, "thinking")
            case "assistant", "redacted_thinking":
                pass  # nobody but who wrote it can read it
            case _:
                raise _not_understood(f"{kind!r} blocks in messages of the role {message.role!r}", "messages")
    if texts or not results:
        results.append({**told, "content": "\n".join(texts)})
    return results


def _result(block: dict[str, Any]) -> dict[str, Any]:
    text = _text(block.get("content") or "", "messages")
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": text}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise HTTPError(400, "a tool_use block needs its input, an object", param="messages")
    function = {"name": _string(block, "name"), "arguments": arguments}
    return {"id": _string(block, "id"), "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise _not_understood(f"tools of the type {tool.type!r}", "tools")
    function = {"name": tool.name, "parameters": tool.input_schema or {"type": "object", "properties": {}}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: Choice) -> dict[str, Any]:
    if choice.type == "tool" and not choice.name:
        raise HTTPError(400, "tool_choice of the type tool needs the tool's name", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    wanted = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {"tool_choice": wanted, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(body: CountTokensBody) -> dict[str, Any]:
    """Thinking is off unless asked for, as Anthropic has it; `adaptive` leaves it to the template."""
    variables: dict[str, Any] = {}
    if body.thinking is None or body.thinking.type != "adaptive":
        variables["enable_thinking"] = body.thinking is not None and body.thinking.type == "enabled"
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
    return {"chat_template_kwargs": variables} if variables else {}


def _response_format(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise HTTPError(400, "an output format is {type: json_schema, schema: {...}}", param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}


def _text(content: Any, name: str) -> str:
    """A text, or text blocks joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise HTTPError(400, f"{name} holds a text or a list of text blocks", param=name)
    for block in content:
        if block.get("type") != "text":
            raise _not_understood(f"{block.get('type')!r} blocks here", name)
    return "\n".join(_string(block, "text") for block in content)


def _string(block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise HTTPError(400, f"a {block.get('type')} block needs {name}, a text", param="messages")
    return value


def _not_understood(what: str, name: str) -> HTTPError:
    return HTTPError(400, f"{what} are not understood; this server reads text and runs no tools", param=name)
