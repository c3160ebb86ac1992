"""Files in requests. The model reads those that hold a text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from forkpoint.checks import member

DOCUMENTS: Final = ("%PDF-", "{\\rtf")  # formats whose files may consist of characters alone, but are no plain text


def file_text(part: Mapping[str, Any]) -> str | None:
    """Return the name and the text of a part of a message that is a text file; None for any other part.

    Chats have a file's data in a `file`, and responses in the part itself.
    """
    if part.get("type") not in ("file", "input_file"):
        return None
    given = part.get("file", part)
    text, name = decoded_text(member(given, "file_data")), member(given, "filename")
    if text is not None and isinstance(name, str) and name:
        return f"{name}\n{text}"
    return text


def decoded_text(data: object) -> str | None:
    """Return the text in base64, with or without the head of a data URL; None if it holds anything but UTF-8 text."""
    if not isinstance(data, str):
        return None
    if data.startswith("data:"):
        data = data.partition(",")[2]
    try:
        text = base64.b64decode(data, validate=True).decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None
    return None if "\0" in text or text.startswith(DOCUMENTS) else text
