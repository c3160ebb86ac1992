"""Pictures out of the parts of messages: data URLs, fetched URLs and PIL images, opened but not decoded."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from forkpoint.checks import member, shown
from forkpoint.engine.conversation import is_image
from forkpoint.engine.image_processor import check_picture
from forkpoint.engine.resized_pictures import PictureFile
from forkpoint.errors import InvalidPromptError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES: Final = 20 << 20  # of one picture's file
FIELDS: Final = ("image_url", "image_pil", "image")  # where a part has its picture
EXAMPLE: Final = "data:image/png;base64,..."
REMOTE: Final = ("http://", "https://")
NONE_FETCHED: Final[Mapping[str, bytes]] = MappingProxyType({})


def picture_of(part: Mapping[str, Any], fetched: Mapping[str, bytes] = NONE_FETCHED) -> Image | PictureFile:
    """Return the picture of an image part: its PIL image, or a file that is opened but not decoded.

    `fetched` has the files behind URLs. Raises InvalidPromptError, which never shows the data.
    """
    given = _given(part)
    if hasattr(given, "convert"):
        check_picture(given)
        return given
    if given is None and part.get("file_id") is not None:
        raise InvalidPromptError(f"file_id is not supported: this server stores no files; give a data URL ({EXAMPLE})")
    if not isinstance(given, str):
        raise InvalidPromptError(f"a part of the type {part.get('type')!r} needs image_url, a data URL ({EXAMPLE})")
    data = fetched.get(given)
    if data is None:
        data = _data_of(given)
    return _open(data)


def detail_of(part: Mapping[str, Any]) -> object:
    """Return what an image part says of its detail, or None."""
    inner = part.get("image_url")
    if isinstance(inner, Mapping):
        part = inner
    return part.get("detail")


def remote_urls(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the http and https URLs of the images of a conversation, each once."""
    urls = (_given(part) for message in messages for part in image_parts(message))
    return list(dict.fromkeys(url for url in urls if isinstance(url, str) and url[:8].lower().startswith(REMOTE)))


def image_parts(message: object) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a message that are images; none for a message of another form."""
    content = member(message, "content")
    if isinstance(content, list | tuple):
        yield from filter(is_image, content)


def _given(part: Mapping[str, Any]) -> Any:
    """Return the picture or the URL of an image part, or None."""
    given = next((part[name] for name in FIELDS if part.get(name) is not None), None)
    if isinstance(given, Mapping):
        return given.get("url")
    return given


def _data_of(url: str) -> bytes:
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        raise InvalidPromptError(
            f"the image URL {shown(url)} is not fetched; give a data URL ({EXAMPLE}), or start the server with "
            "--allowed-media-domains and the http or https URL's host"
        )
    head, comma, data = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidPromptError(f"an image's data URL is not in base64; give {EXAMPLE}")
    if len(data) * 3 // 4 > MAX_BYTES:
        raise InvalidPromptError(f"an image has {len(data) * 3 // 4} bytes; at most {MAX_BYTES} are read")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidPromptError(f"an image's data URL is not valid base64; give {EXAMPLE}") from None


def _open(data: bytes) -> PictureFile:
    """Return the picture of a file, of which only the header is read. Raises InvalidPromptError for one too large."""
    from PIL import Image, UnidentifiedImageError

    try:
        found = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidPromptError(f"an image is too large: {error}") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError):
        raise InvalidPromptError(
            f"an image of {len(data)} bytes is broken, or in none of the formats {', '.join(FORMATS)}"
        ) from None
    check_picture(found)
    return PictureFile.of(found, data)
