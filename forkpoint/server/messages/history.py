"""Translation of the messages of Anthropic's API to those of chat completions."""

from __future__ import annotations

from typing import Any, Final

from forkpoint.checks import member
from forkpoint.server.errors import HTTPError
from forkpoint.server.notices import Note
from forkpoint.server.protocol import MAX_SHOWN

IMAGE_SOURCES: Final = "{type: base64, media_type, data} or {type: url, url}"


def chat_messages(role: str, content: str | list[dict[str, Any]] | None, note: Note) -> list[dict[str, Any]]:
    """Return the messages of a chat completion for one message. Results of tools become messages before its text.

    Raises HTTPError for a block of the user that the model cannot read. Unknown roles are read as the user's. Unknown
    blocks of the assistant, which Anthropic's servers write, are left out; `note` receives notices about both.
    """
    if role not in ("user", "assistant", "system"):
        note(f"requests have messages of the role {role[:MAX_SHOWN]!r}, which are read as the user's")
        role = "user"
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content or ""}]
    message: dict[str, Any] = {"role": role}
    parts: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type")
        match role, kind:
            case _, "text":
                parts.append(_text_part(string(block, "text")))
            case _, "document" if (text := _document(block)) is not None:
                parts.append(_text_part(text))
            case "user", "image" if (image := _image(block)) is not None:
                parts.append(image)
            case "user", "image":
                raise not_understood(f"'image' blocks whose source is not {IMAGE_SOURCES}", "messages")
            case "user", "tool_result":
                results.append(_result(block))
            case "assistant", "tool_use":
                message.setdefault("tool_calls", []).append(_call(block))
            case "assistant", "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + string(block, "thinking")
            case "assistant", "redacted_thinking":
                pass  # it is encrypted by Anthropic
            case "user", _:
                raise not_understood(f"{kind!r} blocks in messages of the role {role!r}", "messages")
            case _:
                shown = str(kind)[:MAX_SHOWN]
                note(f"requests have blocks of the type {shown!r} in messages of the role {role!r}; they are left out")
    if parts or not results:
        results.append({**message, "content": _joined(parts)})
    return results


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as one text if all of them are text, otherwise unchanged."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _image(block: dict[str, Any]) -> dict[str, Any] | None:
    """Return an image as a part of a chat completion; None if its source is not understood."""
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            url = f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            return None
    return {"type": "image_url", "image_url": {"url": url}}


def text_of(content: Any, name: str) -> str:
    """Return a text, or the joined text blocks of the field `name`. Raises HTTPError for other blocks and values."""
    if isinstance(content, str):
        return content
    for block in _blocks(content, name):
        if block.get("type") != "text":
            raise not_understood(f"{block.get('type')!r} blocks here", name)
    return "\n".join(string(block, "text") for block in content)


def string(block: dict[str, Any], name: str) -> str:
    """Return the member `name` of a block. Raises HTTPError if it is not a text."""
    value = block.get(name)
    if not isinstance(value, str):
        raise HTTPError(400, f"a {block.get('type')} block needs {name}, a text", param="messages")
    return value


def not_understood(what: str, name: str) -> HTTPError:
    return HTTPError(400, f"{what} are not understood; this server reads text and images and runs no tools", param=name)


def _blocks(content: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise HTTPError(400, f"{name} holds a text or a list of blocks", param=name)
    return content


def _result(block: dict[str, Any]) -> dict[str, Any]:
    """Return the message with a tool's result. `shown_messages` replaces blocks that are not text later.

    Raises HTTPError for a wrong block.
    """
    content: Any = block.get("content") or ""
    if not isinstance(content, str):
        content = _joined([_result_part(part) for part in _blocks(content, "messages")])
    if block.get("is_error") and isinstance(content, str):
        content = f"Error: {content}"
    elif block.get("is_error"):
        content = [_text_part("Error:"), *content]
    return {"role": "tool", "tool_call_id": string(block, "tool_use_id"), "content": content}


def _result_part(block: dict[str, Any]) -> dict[str, Any]:
    match block.get("type"):
        case "text":
            return _text_part(string(block, "text"))
        case "document" if (text := _document(block)) is not None:
            return _text_part(text)
        case "image" if (image := _image(block)) is not None:
            return image
        case "search_result":
            head = [str(block[name]) for name in ("title", "source") if block.get(name)]
            return {"type": "text", "text": "\n".join([*head, text_of(block.get("content") or "", "messages")])}
        case kind:
            return {**block, "type": str(kind)}


def _document(block: dict[str, Any]) -> str | None:
    """Return the text of a plain text document, or None for PDF files and the like."""
    source = block.get("source")
    text = member(source, "data")
    if member(source, "type") != "text" or not isinstance(text, str):
        return None
    return text


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise HTTPError(400, "a tool_use block needs its input, an object", param="messages")
    function = {"name": string(block, "name"), "arguments": arguments}
    return {"id": string(block, "id"), "type": "function", "function": function}
