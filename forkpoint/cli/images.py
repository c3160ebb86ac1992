"""Images in what people type: paths of image files become parts of a message."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote

from forkpoint.checks import listed

TYPES: Final = MappingProxyType(
    {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif", ".bmp": "bmp"}
)
# A path in quotes, or one whose blanks have a backslash before them, as terminals paste it.
WORD: Final = re.compile(
    r"""(?<!\w)'(?P<single>[^'\n]+)'(?!\w)|(?<!\w)"(?P<double>[^"\n]+)"(?!\w)|(?P<plain>(?:\\.|[^\s'"\\])+)"""
)
ESCAPED: Final = re.compile(r"\\(.)")


def message_content(text: str) -> str | list[dict[str, Any]]:
    """Return a message's content: the text, or a list of parts if it names image files by their paths.

    A path that names no file stays text. Raises OSError if a file cannot be read.
    """
    parts: list[dict[str, Any]] = []
    end = 0
    for word in WORD.finditer(text):
        path = _image_path(word)
        if path is not None:
            parts += [*_text_part(text[end : word.start()]), _image_part(path)]
            end = word.end()
    if not parts:
        return text
    return [*parts, *_text_part(text[end:])]


def num_images(content: str | list[dict[str, Any]]) -> int:
    return sum(part["type"] == "image_url" for part in listed(content))


def _image_path(word: re.Match[str]) -> Path | None:
    text = word["single"] or word["double"]
    if text is None:
        text = ESCAPED.sub(r"\1", word["plain"])
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://"))
    path = Path(text)
    if path.suffix.lower() not in TYPES:
        return None
    try:
        path = path.expanduser()
        if path.is_file():
            return path
    except (OSError, RuntimeError, ValueError):  # too long, of an unknown user, or with a null character
        pass
    return None


def _image_part(path: Path) -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    kind = TYPES[path.suffix.lower()]
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def _text_part(text: str) -> list[dict[str, Any]]:
    if not text.strip():
        return []
    return [{"type": "text", "text": text}]
