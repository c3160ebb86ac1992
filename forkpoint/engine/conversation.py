"""Checks messages of a conversation and brings them into one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from forkpoint.checks import json_value, member
from forkpoint.engine.image_processor import why_no_images
from forkpoint.errors import InvalidPromptError

Message: TypeAlias = Mapping[str, Any]

# part type -> key of its text
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
IMAGE_PARTS = ("image_url", "input_image", "image", "image_pil")  # part types of images
FILE_PARTS = ("file", "input_file", "document")  # part types of files, which are not read
VIDEO_PART, VIDEO_URL_PART = "video", "video_url"  # part types of the frames of a video, and of a video file
SPEAKERS = ("system", "developer", "user")  # roles whose messages need content
TakeImage: TypeAlias = Callable[[Mapping[str, Any]], str]  # returns the text that stands for an image part
SHOWN = 80  # characters of a wrong value that an error message shows


def read_message(message: object, *, in_parts: bool, take_image: TakeImage | None = None) -> dict[str, Any]:
    """Return a message in the form that templates read. Answers of a server can be sent back unchanged.

    `content` becomes a text: parts are joined, or kept for templates that read parts. Null becomes an empty text, and a
    refusal replaces missing content. `reasoning` and `reasoning_content` are synonyms, so both are set. Arguments of
    tool calls become mappings; arguments that are not a JSON object stay texts. An empty list of calls is removed.
    An image becomes the text that `take_image` returns for it, with nothing between it and the texts next to it;
    without that function it is refused.
    Raises InvalidPromptError, which says what is wrong.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidPromptError(f"a message is a dict with 'role' and 'content'; given {message!r:.{SHOWN}}")
    if message["role"] == "function" or message.get("function_call") is not None:
        raise InvalidPromptError(
            "function_call and messages of the role 'function' are not supported; send tool_calls, and their results "
            "in messages of the role 'tool'"
        )
    if "content" not in message and message["role"] in SPEAKERS:
        raise InvalidPromptError(
            f"a message of the role {message['role']!r} needs 'content'; given {message!r:.{SHOWN}}"
        )
    kept = {name: value for name, value in message.items() if value is not None}
    refusal = kept.pop("refusal", None)
    texts = _texts(message.get("content"), take_image)
    if not any(texts) and isinstance(refusal, str):
        texts = [refusal]
    kept["content"] = content_of(texts, in_parts=in_parts)
    reasoning = kept.get("reasoning_content", kept.get("reasoning"))
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InvalidPromptError(f"the reasoning of a message is a text; given {reasoning!r:.{SHOWN}}")
        kept |= {"reasoning_content": reasoning, "reasoning": reasoning}
    calls = kept.pop("tool_calls", None)
    if calls:
        kept["tool_calls"] = [_call(call) for call in _list(calls, "tool_calls must be a list of calls")]
    return kept


def content_of(texts: Sequence[str], *, in_parts: bool) -> str | list[dict[str, str]]:
    """Return texts as content: joined by line breaks, or a list of text parts."""
    if in_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def content_texts(message: Message) -> list[str]:
    """Return the texts in the content of a read message: one, or one for each part."""
    content = message["content"]
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [str(content)]


def with_text(message: Message, text: str) -> dict[str, Any]:
    """Return the message with `text` as its content, in a list of parts if its content is one."""
    return {**message, "content": content_of([text], in_parts=isinstance(message["content"], list))}


def last_text(message: Message) -> str:
    """Return the text that the content ends with: all of it, or the last part."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = content[-1].get("text", "")
    return str(content)


def _texts(content: object, take_image: TakeImage | None) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    parts = _list(content, "message content must be a text or a list of parts")
    texts = [_part(part, take_image) for part in parts]
    if any(map(is_media, parts)):
        return ["".join(texts)]
    return texts


def is_image(part: object) -> bool:
    """Return whether this part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def is_media(part: object) -> bool:
    """Return whether this part of a message is an image or a video."""
    return is_image(part) or (isinstance(part, Mapping) and part.get("type") in (VIDEO_PART, VIDEO_URL_PART))


def _part(part: object, take_image: TakeImage | None) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and is_media(part):
        if take_image is None:
            raise InvalidPromptError(f"a message may contain only text parts: {why_no_images()}")
        return take_image(part)
    text = None
    if (name := TEXT_PARTS.get(str(member(part, "type")))) is not None:
        text = member(part, name)
    if not isinstance(text, str):
        given = f"{part!r:.{SHOWN}}"
        if isinstance(part, Mapping):  # its values may be data
            given = f"a part of the type {part.get('type')!r:.{SHOWN}} with {', '.join(map(str, part))!r:.{SHOWN}}"
            if part.get("type") in FILE_PARTS:
                given += "; send the text of a file, or its pages as images"
        raise InvalidPromptError(
            f"a message may contain only text parts and images, and videos of models that read them; given {given}"
        )
    return text


def _list(given: object, rule: str) -> Sequence[Any]:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise InvalidPromptError(f"{rule}; given {given!r:.{SHOWN}}")
    return given


def _call(call: object) -> dict[str, Any]:
    function = member(call, "function")
    if not isinstance(call, Mapping) or not isinstance(member(function, "name"), str):
        raise InvalidPromptError("a tool call in a message needs a function with name and arguments")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: object) -> dict[str, Any] | str:
    """Return the arguments as a mapping, or as a text if they are not a JSON object. Nothing becomes {}."""
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False, default=str)
    if not given.strip():
        return {}
    read = json_value(given, given)
    if read is None or isinstance(read, dict):
        return read or {}
    return given
