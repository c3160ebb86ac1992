"""Translation of the items of OpenAI's Responses API to the messages of a chat completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from forkpoint.checks import listed, member
from forkpoint.obs.notices import Note
from forkpoint.server.custom_tools import custom_arguments
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import MAX_SHOWN
from forkpoint.server.responses.client_tools import SEARCH
from forkpoint.server.responses.tools import flat_name, names_of
from forkpoint.server.seal import unsealed

CALL, OUTPUT = "_call", "_call_output"  # suffixes of the types of calls, and of their results
RESULT_PARTS: Final = ("input_text", "input_image", "input_file")  # part types of tools' results
ITEM_FIELDS: Final = ("id", "type", "status", "call_id", "caller", "created_by")  # fields that are not arguments


def is_reference(item: dict[str, Any]) -> bool:
    """Return whether `item` is a reference to an item of a stored response."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.keys() - {"type"} == {"id"})


def referred(item: dict[str, Any]) -> str:
    """Return the id of the item that the reference `item` names."""
    return str(item.get("id"))


def resolved(items: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `items` with each reference replaced by the item of `stored`. Raises HTTPError for an unknown id."""
    by_id = {item["id"]: item for item in stored}
    for item in items:
        if is_reference(item) and referred(item) not in by_id:
            name = referred(item)[:MAX_SHOWN]
            text = f"there is no stored item {name!r}; send the item itself, or previous_response_id"
            raise HTTPError(400, text, param="input")
    return [by_id[referred(item)] if is_reference(item) else item for item in items]


def messages_of(items: Sequence[dict[str, Any]], note: Note) -> list[dict[str, Any]]:
    """Return items as messages. Consecutive reasoning, text and calls become one message of the assistant.

    Items that record work of OpenAI's servers are left out, and `note` receives a notice about them. Raises HTTPError
    for a wrong item.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = str(item.get("type") or "message")
        if kind == "local_shell_call_output":
            item = {"call_id": item.get("id"), **item}  # OpenAI's form has the id of the call as its own id
        match kind:
            case "message":
                _add_message(messages, item)
            case "reasoning":
                _last_answer(messages, after=("content", "tool_calls"))["reasoning_content"] = _reasoning(item)
            case "tool_search_output" if item.get("call_id"):
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _found(item)})
            case "tool_search_output" | "additional_tools":
                pass  # its tools are among those of the request
            case _ if kind.endswith(OUTPUT) and item.get("call_id"):
                output = item.get("output")
                if output is None:
                    output = item.get("status")  # a patch that was applied may have no other output
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(output)})
            case _ if kind.endswith(CALL) and item.get("call_id"):
                _last_answer(messages).setdefault("tool_calls", []).append(_call(kind, item))
            case "function_call" | "custom_tool_call" | "function_call_output" | "custom_tool_call_output":
                raise HTTPError(400, f"an item of the type {kind} needs its call_id", param="input")
            case _:
                note(f"requests have items of the type {kind[:MAX_SHOWN]!r}, which are left out of the conversation")
    return messages


def _call(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """Return the call of a function, or of another tool that the client ran, in the form of a chat completion."""
    name, namespace = item.get("name"), item.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = flat_name(namespace, name)
    arguments: Any
    match kind:
        case "function_call":
            arguments = item.get("arguments")
        case "custom_tool_call":
            arguments = custom_arguments(item.get("input"))
        case "computer_call" if "actions" in item:
            name, arguments = kind.removesuffix(CALL), {"actions": item["actions"]}
        case "tool_search_call":
            name, arguments = SEARCH, item.get("arguments")
        case _:
            name = name or kind.removesuffix(CALL)
            rest = {key: value for key, value in item.items() if key not in ITEM_FIELDS}
            arguments = item.get("action", item.get("operation", rest))
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise HTTPError(400, f"a message has role user, assistant, system or developer; given {role!r}", param="input")
    content = _content(item.get("content"))
    if role == "assistant":
        _last_answer(messages, after=("content", "tool_calls"))["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _last_answer(messages: list[dict[str, Any]], after: Sequence[str] = ()) -> dict[str, Any]:
    """Return the assistant's message at the end of `messages`.

    Append a new one if there is none, or if the last one has any of the fields `after`.
    """
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in after):
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: Any) -> Any:
    """Return a text or a list of parts; raises HTTPError for others.

    Parts of a wrong kind are refused later, by the chat template.
    """
    if isinstance(content, str | list):
        return content
    raise HTTPError(400, "an item's content, or its output, is a text or a list of text parts", param="input")


def _output(output: Any) -> Any:
    """Return a tool's result: a text or a list of parts. Other objects and lists become JSON; else HTTPError.

    The screenshot of a computer is an image.
    """
    if member(output, "type") == "computer_screenshot":
        output = {**output, "type": "input_image"}
    if member(output, "type") in RESULT_PARTS:
        output = [output]
    has_other_items = any(not isinstance(item, dict) or "type" not in item for item in listed(output))
    if isinstance(output, dict) or has_other_items:
        return json.dumps(output, ensure_ascii=False)
    return _content(output)


def _found(item: dict[str, Any]) -> Any:
    """Return the result of a search for tools: a reference to each, where the model sees it."""
    names = names_of(listed(item.get("tools")))
    return [{"type": "tool_reference", "tool_name": name} for name in names] or "No tool was found."


def _reasoning(item: dict[str, Any]) -> str:
    content = item.get("content")
    if not content and (text := unsealed(item.get("encrypted_content"))):
        return text
    texts = [member(part, "text") for part in listed(content or item.get("summary") or [])]
    return "\n".join(text for text in texts if isinstance(text, str))
