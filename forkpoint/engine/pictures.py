"""Pictures out of the parts of messages: data URLs, fetched URLs and PIL images, opened but not decoded."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from forkpoint.engine.image_processor import MAX_SOURCE_PIXELS, check_picture
from forkpoint.engine.media_urls import EXAMPLES, media_bytes, source_of, url_of
from forkpoint.engine.resized_pictures import PictureFile
from forkpoint.errors import InvalidPromptError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
EXAMPLE: Final = EXAMPLES["image"]
START_OF_SCAN: Final = b"\xff\xda"  # never among a JPEG's compressed data
MAX_SCANS: Final = 100  # scans of a JPEG. Each goes over all pixels; encoders write about 10; 14 bytes suffice for one


def picture_of(part: Mapping[str, Any], fetched: Mapping[str, bytes]) -> Image | PictureFile:
    """Return the picture of an image part: its PIL image, or a file that is opened but not decoded.

    `fetched` has the files behind URLs. Raises InvalidPromptError, which never shows the data.
    """
    given = url_of(part)
    if hasattr(given, "convert"):
        check_picture(given)
        return given
    if given is None and source_of(part).get("file_id") is not None:
        raise InvalidPromptError(f"file_id is not supported: this server stores no files; give a data URL ({EXAMPLE})")
    if not isinstance(given, str):
        raise InvalidPromptError(
            f"a part of the type {part.get('type')!r} needs image_url, a data URL ({EXAMPLE}), or a source with base64"
        )
    return opened_picture(media_bytes(given, fetched, "image"))


def detail_of(part: Mapping[str, Any]) -> object:
    """Return what an image part says of its detail, or None."""
    inner = part.get("image_url")
    if isinstance(inner, Mapping):
        part = inner
    return part.get("detail")


def opened_picture(data: bytes) -> PictureFile:
    """Return the picture of a file, of which only the header is read. Raises InvalidPromptError for one too large."""
    from PIL import Image, UnidentifiedImageError

    try:
        found = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:  # the picture has far more pixels than `check_picture` allows
        raise InvalidPromptError(f"an image is too large: from 1 to {MAX_SOURCE_PIXELS} pixels are read") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError):
        raise InvalidPromptError(
            f"an image of {len(data)} bytes is broken, or in none of the formats {', '.join(FORMATS)}"
        ) from None
    check_picture(found)
    if found.format == "JPEG" and (num_scans := data.count(START_OF_SCAN)) > MAX_SCANS:
        raise InvalidPromptError(f"a JPEG image has {num_scans} scans; at most {MAX_SCANS} are read: save it again")
    return PictureFile.of(found, data)
