"""Returns the bytes of single tokens, also of tokens that are only part of a character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token of a `tokenizers.Tokenizer`. Results are kept."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._kept = {token: added.content.encode() for token, added in backend.get_added_tokens_decoder().items()}
        self._steps = list(_decoding_steps(backend))
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in self._steps)
        self._has_byte_tokens = any(step["type"] == "ByteFallback" for step in self._steps)
        self._spaces = [mark for step in self._steps if (mark := _space_mark(step))]

    def of(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an id without a token."""
        found = self._kept.get(token_id)
        if found is None:
            found = self._kept[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            values = [BYTE_OF_CHARACTER.get(character) for character in piece]
            return b"".join(piece[i].encode() if value is None else bytes([value]) for i, value in enumerate(values))
        if self._has_byte_tokens and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if not self._spaces:
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()
        for mark in self._spaces:
            piece = piece.replace(mark, " ")
        return str(piece).encode()


def _decoding_steps(backend: Any) -> Iterator[dict[str, Any]]:
    """Yield the decoder's steps in order, as tokenizer.json describes them; none without a decoder."""
    if backend.decoder is None:
        return
    decoder = json.loads(backend.decoder.__getstate__())
    yield from decoder.get("decoders", [decoder])  # only a sequence has `decoders`


def _space_mark(step: dict[str, Any]) -> str:
    """Return the characters that the step turns into spaces; empty if there are none."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        return str(step["pattern"].get("String", ""))
    return ""


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's map from visible characters to bytes: printable Latin-1 is unchanged, others start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
