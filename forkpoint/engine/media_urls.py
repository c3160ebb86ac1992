"""Files behind the URLs of images and videos: data URLs, and files that were fetched."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal
from urllib.parse import unquote

from forkpoint.checks import member, shown
from forkpoint.engine.conversation import is_image, is_media
from forkpoint.errors import InvalidPromptError

MAX_BYTES: Final = 20 << 20  # bytes of one file
# Keys of a part under which its picture or video stands. Hugging Face, MCP and LangChain use the last three.
FIELDS: Final = ("image_url", "image_pil", "image", "video_url", "url", "data", "base64")
EXAMPLES: Final = {"image": "data:image/png;base64,...", "video": "data:video/mp4;base64,..."}
REMOTE: Final = ("http://", "https://")
URL_ALPHABET: Final = str.maketrans("-_", "+/")
NONE_FETCHED: Final[Mapping[str, bytes]] = MappingProxyType({})


def source_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the source of a part in the form of Anthropic's API, or the part itself if it has none."""
    source = part.get("source")
    if isinstance(source, Mapping):
        return source
    return part


def url_of(part: Mapping[str, Any]) -> Any:
    """Return the URL of a part, or base64 without the head of a data URL, or the picture itself, or None."""
    part = source_of(part)
    given = next((part[name] for name in FIELDS if part.get(name) is not None), None)
    if isinstance(given, Mapping):
        return given.get("url")
    return given


def media_parts(message: object) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a message that are images or videos; none for a message of another form."""
    content = member(message, "content")
    if isinstance(content, list | tuple):
        yield from filter(is_media, content)


def num_media(messages: Sequence[object]) -> tuple[int, int]:
    """Return the number of images and the number of videos of a conversation."""
    parts = [part for message in messages for part in media_parts(message)]
    num_images = sum(map(is_image, parts))
    return num_images, len(parts) - num_images


def remote_urls(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the http and https URLs of the images and videos of a conversation, each once."""
    urls = (url_of(part) for message in messages for part in media_parts(message))
    return list(dict.fromkeys(url for url in urls if isinstance(url, str) and url[:8].lower().startswith(REMOTE)))


def media_bytes(url: str, fetched: Mapping[str, bytes], kind: Literal["image", "video"]) -> bytes:
    """Return the file behind a data URL, or one of those that were `fetched`. A data URL may lack its head.

    Raises InvalidPromptError, which never shows the data.
    """
    if (found := fetched.get(url)) is not None:
        return found
    example, an = EXAMPLES[kind], {"image": "an image", "video": "a video"}[kind]
    data, (scheme, colon, rest) = url, url.partition(":")
    if colon:
        if scheme.lower() != "data":
            where = f" {shown(url)}" if rest.startswith("//") else ""  # anything else may be data
            raise InvalidPromptError(
                f"the {kind} URL{where} is not fetched; give a data URL ({example}), or start the server with "
                "--allowed-media-domains and the http or https URL's host"
            )
        head, comma, data = rest.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidPromptError(f"{an}'s data URL is not in base64; give {example}")
    if len(data) * 3 // 4 > MAX_BYTES:
        raise InvalidPromptError(f"{an} has {len(data) * 3 // 4} bytes; at most {MAX_BYTES} are read")
    try:
        return _decoded(data)
    except ValueError:
        raise InvalidPromptError(f"the data of {an} are not valid base64; give {example}") from None


def _decoded(data: str) -> bytes:
    """Decode base64, also with line breaks, percent signs, the alphabet for URLs, or without padding.

    Raises ValueError.
    """
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        plain = "".join(unquote("".join(data.split())).split()).translate(URL_ALPHABET).rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
