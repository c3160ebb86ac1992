"""Translation of the messages of Anthropic's API to those of chat completions."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final

from forkpoint.checks import listed, member
from forkpoint.obs.notices import Note
from forkpoint.server.chat.history import text_part
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import MAX_SHOWN
from forkpoint.server.seal import unsealed
from forkpoint.server.text_files import decoded_text

IMAGE_SOURCES: Final = "{type: base64, media_type, data} or {type: url, url}"
FILES_NOT_READ: Final = (
    "'document' blocks with files are not read; send the text, in a source of the type text or content, or the pages "
    "as images"
)


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
            case _, "text" | "image" | "document" | "search_result" if (found := _parts(block)) is not None:
                parts += found
            case "user" | "system", "image":
                raise not_understood(f"'image' blocks whose source is not {IMAGE_SOURCES}", "messages")
            case "user" | "system", "document":
                raise HTTPError(400, FILES_NOT_READ, param="messages")
            case "user" | "system", "tool_addition" | "tool_removal":
                parts.append(_tool_change(block))
            case "user", "tool_result":
                results.append(_result(block))
            case "assistant", "tool_use":
                message.setdefault("tool_calls", []).append(_call(block))
            case "assistant", "thinking":
                if thinking := string(block, "thinking") or unsealed(block.get("signature")):
                    message["reasoning_content"] = message.get("reasoning_content", "") + thinking
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


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts with a line break between consecutive texts: one text if there is nothing else."""
    joined: list[dict[str, Any]] = []
    for is_text, group in groupby(parts, lambda part: part["type"] == "text"):
        if is_text:
            joined.append(text_part("\n".join(part["text"] for part in group)))
        else:
            joined += group
    if all(part["type"] == "text" for part in joined):
        return "".join(part["text"] for part in joined)
    return joined


def _parts(block: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the text and the images of a block as parts of a chat completion, or None if they cannot be read.

    Texts begin with the title, the context and the source of a document or search result. Raises HTTPError for a block
    that lacks its text.
    """
    content: Any
    match block:
        case {"type": "text"}:
            return [text_part(string(block, "text"))]
        case {"type": "image", "source": {"type": "base64", "data": str()} | {"type": "url", "url": str()} as source}:
            return [{"type": "image", "source": source}]
        case {"type": "image", "source": {"type": "file"} as source}:
            return [{"type": "image", "source": source}]
        case {"type": "document", "source": {"type": "text", "data": str(content)}}:
            pass
        case {"type": "document", "source": {"type": "base64", "data": data}} if content := decoded_text(data):
            pass
        case {"type": "document", "source": {"type": "content", "content": content}} | {
            "type": "search_result",
            "content": content,
        }:
            pass
        case _:
            return None
    head = (block.get(name) for name in ("title", "context", "source"))
    parts = [text_part(text) for text in head if text and isinstance(text, str)]
    if isinstance(content, str):
        return [*parts, text_part(content)]
    for inner in _blocks(content, "messages"):
        found = _parts(inner)
        if found is None:
            return None
        parts += found
    return parts


def text_of(content: Any, name: str) -> str:
    """Return a text, or the joined text blocks of the field `name`. Raises HTTPError for other blocks and values."""
    if isinstance(content, str):
        return content
    for block in _blocks(content, name):
        if (kind := block.get("type")) != "text":
            raise HTTPError(400, f"{name} has blocks of text alone; put {kind!r} blocks into messages", param=name)
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
        content = _joined([part for inner in _blocks(content, "messages") for part in _result_parts(inner)])
    if block.get("is_error") and isinstance(content, str):
        content = f"Error: {content}"
    elif block.get("is_error"):
        content = [text_part("Error:"), *content]
    return {"role": "tool", "tool_call_id": string(block, "tool_use_id"), "content": content}


def _tool_change(block: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a message that adds or removes a tool. `shown_messages` shows the definition of an added one.

    Raises HTTPError for a wrong block.
    """
    tool = block.get("tool")
    name = member(tool, "name") or member(member(tool, "definition"), "name")
    if not isinstance(name, str):
        raise not_understood(f"'{block['type']}' blocks without the name of a tool", "messages")
    if block["type"] == "tool_removal":
        return text_part(f"The tool {name} is no longer available.")
    return {"type": "tool_reference", "tool_name": name}


def added_tools(content: object) -> list[Any]:
    """Return the definitions of tools that the blocks of a message add. They are not checked yet."""
    changes = (member(block, "tool") for block in listed(content) if member(block, "type") == "tool_addition")
    return [found for change in changes if (found := member(change, "definition")) is not None]


def _result_parts(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a block in a tool's result; the block itself if it cannot be read."""
    found = _parts(block)
    if found is None:
        return [{**block, "type": str(block.get("type"))}]
    return found


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise HTTPError(400, "a tool_use block needs its input, an object", param="messages")
    function = {"name": string(block, "name"), "arguments": arguments}
    return {"id": string(block, "id"), "type": "function", "function": function}
