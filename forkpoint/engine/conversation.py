"""Messages of a conversation in the form that chat templates read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from forkpoint.errors import InvalidPromptError

Message: TypeAlias = Mapping[str, Any]

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # where it is
SPEAKERS = ("system", "developer", "user")  # whose messages are nothing without content
SHOWN = 80  # characters of a wrong value, in an error message


def normalised(message: object, *, in_parts: bool) -> dict[str, Any]:
    """A message as templates can read it; what a server sends as an answer can be sent back as it is.

    `content` is a text: parts are joined (or kept, for templates that read parts), null is empty (a template that
    adds texts cannot add null), a refusal stands where there is no content. `reasoning` and `reasoning_content` are
    two names of the same thing and both given. Arguments of tool calls are mappings, and an empty list of calls is
    none.
    Raises InvalidPromptError naming what is wrong.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidPromptError(f"a message is a dict with 'role' and 'content'; given {message!r:.{SHOWN}}")
    if message["role"] == "function" or message.get("function_call") is not None:
        raise InvalidPromptError(
            "function_call and messages of the role 'function' are not understood; send tool_calls, and their results "
            "in messages of the role 'tool'"
        )
    if "content" not in message and message["role"] in SPEAKERS:
        raise InvalidPromptError(
            f"a message of the role {message['role']!r} needs 'content'; given {message!r:.{SHOWN}}"
        )
    kept = {name: value for name, value in message.items() if value is not None}
    refusal = kept.pop("refusal", None)
    texts = _texts(message.get("content"))
    if not any(texts) and isinstance(refusal, str):
        texts = [refusal]
    kept["content"] = [_text_part(text) for text in texts] if in_parts else "\n".join(texts)
    reasoning = kept.get("reasoning_content", kept.get("reasoning"))
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InvalidPromptError(f"the reasoning of a message is a text; given {reasoning!r:.{SHOWN}}")
        kept |= {"reasoning_content": reasoning, "reasoning": reasoning}
    calls = kept.pop("tool_calls", None)
    if calls:
        kept["tool_calls"] = [_call(call) for call in _list(calls, "tool_calls must be a list of calls")]
    return kept


def number_calls(conversation: Sequence[Message]) -> list[Message]:
    """Normalised messages with `functions.NAME:N` as the ids of calls, N counting all of them: Kimi's templates show a
    call by its id alone, so any other id would hide which function was called."""
    numbers, ids, numbered = itertools.count(), dict[str, str](), list[Message]()
    for message in conversation:
        if calls := message.get("tool_calls"):
            own = [{**call, "id": f"functions.{call['function']['name']}:{next(numbers)}"} for call in calls]
            shown = [(call.get("id"), new["id"]) for call, new in zip(calls, own, strict=True)]
            ids |= {given: name for given, name in shown if isinstance(given, str)}
            message = {**message, "tool_calls": own}
        answered = message.get("tool_call_id")
        if isinstance(answered, str) and answered in ids:
            message = {**message, "tool_call_id": ids[answered]}
        numbered.append(message)
    return numbered


def last_text(message: Message) -> str:
    """What its content ends with: all of it, or the last part."""
    content = message.get("content") or ""
    return str(content[-1]["text"] if isinstance(content, list) else content)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _texts(content: object) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    return [_part(part) for part in _list(content, "message content must be a text or a list of text parts")]


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    name = TEXT_PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    text = part.get(name) if isinstance(part, Mapping) and name is not None else None
    if not isinstance(text, str):
        raise InvalidPromptError(f"only text parts are understood in a message; given {part!r:.{SHOWN}}")
    return text


def _list(given: object, rule: str) -> Sequence[Any]:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise InvalidPromptError(f"{rule}; given {given!r:.{SHOWN}}")
    return given


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidPromptError("a tool call in a message needs a function with name and arguments")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments and arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidPromptError(f"the arguments of a tool call are not JSON: {arguments:.{SHOWN}}") from None
    return {**call, "function": {**function, "arguments": arguments}}
