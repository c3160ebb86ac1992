"""The messages of a request in the form that a chat template can show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from forkpoint.checks import member
from forkpoint.engine.conversation import is_image
from forkpoint.obs.notices import Note
from forkpoint.server.chat.body import ChatMessage, ToolSpec
from forkpoint.server.chat.tools import shown_tool
from forkpoint.server.custom_tools import custom_arguments
from forkpoint.server.text_files import file_text

# Claude Code begins its system prompt with a line for billing, which differs from request to request.
BILLING_LINES: Final = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")
REASONING_TYPES: Final = ("thinking", "reasoning", "redacted_thinking")  # parts of answers with their reasoning
TEXT_TYPES: Final = ("text", "input_text", "output_text", "refusal")


def shown_messages(
    messages: Sequence[ChatMessage],
    note: Note,
    *,
    tools: Sequence[ToolSpec] = (),
    drops_billing_lines: bool,
    shows_images: bool = False,
) -> list[dict[str, Any]]:
    """Return `messages` as dicts in a form that the model can read. Thinking parts of answers become their reasoning.

    A part of a tool's result that the model cannot read is replaced by a text that says so, and `note` receives a
    notice. Refusing it would end the conversation, as the client cannot change what its tool returned. Images right
    after a result belong to it, since some clients send results as texts. `shows_images`: the model reads images, so
    they stay. `tools`: those of the request. A message that refers to a deferred one shows it. `drops_billing_lines`:
    leave out billing lines at the head of the system prompt, which would keep the rest of the prompt from being found
    in the prefix cache.
    """
    shown = [message.model_dump(exclude_unset=True) for message in messages]
    if drops_billing_lines and shown and shown[0]["role"] in ("system", "developer"):
        content = _without_billing_lines(shown[0].get("content"))
        if content:
            shown[0]["content"] = content
        elif shown[0].get("content"):
            del shown[0]
    _take_function_calls(shown)
    deferred = {tool.function.name: tool for tool in tools if tool.defer_loading}
    follows_result = False
    for message in shown:
        role, parts = message["role"], message.get("content")
        if isinstance(parts, list):
            message["content"] = parts = [_readable(part, deferred) for part in parts]
        if isinstance(parts, list) and role == "assistant":
            _take_reasoning(message)
        elif isinstance(parts, list) and role == "tool":
            message["content"] = [
                part if shows_images and is_image(part) else _result_part(part, note) for part in parts
            ]
        elif isinstance(parts, list) and follows_result and not shows_images:
            message["content"] = [_result_part(part, note) if is_image(part) else part for part in parts]
        follows_result = role == "tool" or (follows_result and isinstance(parts, list) and all(map(is_image, parts)))
    return shown


def _take_function_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Give older and other forms of calls and results the form that templates show: that of functions.

    These are a `function_call`, a message of the role `function`, and a call of a custom tool.
    """
    call_id = ""
    for number, message in enumerate(messages):
        function = message.pop("function_call", None)
        if function is not None and not message.get("tool_calls"):
            call_id = f"call_{number}"
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        for call in message.get("tool_calls") or ():
            if isinstance(custom := call.pop("custom", None), dict):
                arguments = custom_arguments(custom.get("input"))
                call |= {"type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}
        if message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": call_id}


def _take_reasoning(message: dict[str, Any]) -> None:
    """Move the texts of thinking parts, as Mistral's and LangChain's clients send them back, to the reasoning."""
    parts = [part for part in message["content"] if part.get("type") not in REASONING_TYPES]
    texts = [_reasoning_of(part) for part in message["content"] if part.get("type") in REASONING_TYPES]
    if texts:
        message["content"] = parts
        if message.get("reasoning_content") is None and message.get("reasoning") is None:
            message["reasoning_content"] = "".join(texts)


def _reasoning_of(part: dict[str, Any]) -> str:
    """Return the text of a thinking part, or an empty text for one that is encrypted."""
    given = next((part[name] for name in ("thinking", "reasoning", "text") if name in part), "")
    if isinstance(given, list):
        given = "".join(str(member(each, "text") or "") for each in given)
    return str(given or "")


def _without_billing_lines(content: Any) -> Any:
    """Return a text or a list of parts without the billing lines at its head; other content as it is."""
    if isinstance(content, str):
        return BILLING_LINES.sub("", content)
    if not isinstance(content, list) or not content or not isinstance(text := content[0].get("text"), str):
        return content
    rest = BILLING_LINES.sub("", text)
    if rest == text:
        return content
    if not rest:
        return content[1:]
    return [{**content[0], "text": rest}, *content[1:]]


def _readable(part: dict[str, Any], deferred: Mapping[str, ToolSpec]) -> dict[str, Any]:
    """Return a file of text, or a reference to a tool, as a text part; another part as it is."""
    if part.get("type") == "tool_reference":
        name = str(part.get("tool_name"))
        if name not in deferred:
            return text_part(f"The tool {name} is available.")
        return text_part(f"The tool {name} is available:\n{json.dumps(shown_tool(deferred[name]), ensure_ascii=False)}")
    text = file_text(part)
    return part if text is None else text_part(text)


def _result_part(part: dict[str, Any], note: Note) -> dict[str, Any]:
    """Return a part of a tool's result as a text part. `note` receives a notice if it has no text."""
    kind = part.get("type")
    if kind in TEXT_TYPES:
        return part
    text = part.get("text")
    if isinstance(text, str):
        return text_part(text)
    name = str(kind).removeprefix("input_").removesuffix("_url")[:40]
    note(f"results of tools have parts of the type {name!r}; the model reads a note in place of each")
    return text_part(f"[The tool returned a part of the type {name}, which cannot be shown here.]")


def text_part(text: str) -> dict[str, Any]:
    """Return the part of a message that has this text."""
    return {"type": "text", "text": text}
