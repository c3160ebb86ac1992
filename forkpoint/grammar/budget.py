"""Ends the thinking of an answer after a number of tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from copy import copy
from typing import Final

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.params import THINK, THINK_END, SamplingParams

BEGIN, END = THINK.encode(), THINK_END.encode()
# What the answer is doing. OPENING: its first characters may become `<think>`.
OPENING, THINKING, CONTENT = "opening", "thinking", "content"
MAX_CHARACTER_BYTES: Final = 4


class ThinkingBudget:
    """Follows the tokens of one answer. `forced_id` is the id that has to come next, or None.

    Once there are as many tokens of thinking as `params` allow, the ids of a text that ends the thinking are forced,
    one after another. A character that consists of several tokens is completed first. The ids `openings` begin a tool
    call, which also ends thinking.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, openings: Collection[int]) -> None:
        assert params.thinking_token_budget is not None
        self._limit = params.thinking_token_budget
        self._end_text = params.thinking_end
        self._tokenizer = tokenizer
        self._openings = openings
        self._state = THINKING if params.thinking == "open" else OPENING
        self._num_tokens = 0  # tokens of thinking
        self._forced: tuple[int, ...] = ()
        self._text = b""  # the answer's first characters in OPENING, the last ones in THINKING
        self._force_end()

    @property
    def forced_id(self) -> int | None:
        return self._forced[0] if self._forced else None

    def is_far(self, num_tokens: int) -> bool:
        """Return whether none of the next `num_tokens` ids can be forced, whatever the ids before it are."""
        is_over = self._state == CONTENT and not self._forced
        return is_over or self._limit - self._num_tokens > num_tokens

    def copy(self) -> ThinkingBudget:
        return copy(self)

    def stop(self) -> None:
        """Force nothing more in this answer, because `forced_id` cannot come."""
        self._state, self._forced = CONTENT, ()

    def accept(self, token_id: int) -> None:
        """Follow one more token, which is `forced_id` if there is one. May force the end of the thinking."""
        if self._forced:
            self._forced = self._forced[1:]
        elif self._state == OPENING:
            self._open(self._tokenizer.token_bytes(token_id))
            self._force_end()
        elif self._state == THINKING:
            self._num_tokens += 1
            self._think(self._tokenizer.token_bytes(token_id))
            if token_id in self._openings:
                self._state = CONTENT
            self._force_end()

    def _open(self, data: bytes) -> None:
        self._text = (self._text + data).lstrip()
        if self._text.startswith(BEGIN):
            self._state = THINKING
            rest, self._text = self._text[len(BEGIN) :], b""
            self._think(rest)
        elif not BEGIN.startswith(self._text):
            self._state = CONTENT

    def _think(self, data: bytes) -> None:
        text = self._text + data
        if END in text:
            self._state = CONTENT
        self._text = text[-len(END) :]

    def _force_end(self) -> None:
        """Force the end of the thinking if it has as many tokens as it may have."""
        if self._state != THINKING or self._num_tokens < self._limit or _is_cut(self._text):
            return
        self._state = CONTENT
        tag = self._end_text.index(THINK_END)
        text = self._end_text[tag:]
        begun = next((size for size in range(len(END) - 1, 0, -1) if self._text.endswith(END[:size])), 0)
        if begun:  # the model has begun to spell the tag
            text = text[begun:]
        elif self._text and not self._text.endswith(b"\n"):
            text = self._end_text
        self._forced = _ids_of(text, self._tokenizer)


def _ids_of(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return ids whose bytes are exactly this text, if the vocabulary allows that.

    Some tokenizers would put a space before it, so they get byte tokens.
    """
    backend = tokenizer.backend
    ids = tuple(backend.encode(text, add_special_tokens=False).ids)
    if b"".join(map(tokenizer.token_bytes, ids)) == text.encode():
        return ids
    exact: list[int | None] = []
    for part in re.split(f"({THINK_END})", text):
        whole = backend.token_to_id(part)
        exact += [whole] if whole is not None else [backend.token_to_id(f"<0x{byte:02X}>") for byte in part.encode()]
    found = tuple(token_id for token_id in exact if token_id is not None)
    return found if len(found) == len(exact) else ids


def _is_cut(text: bytes) -> bool:
    """Return whether UTF-8 text ends within a character. Bytes that begin no character do not count."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[1 - MAX_CHARACTER_BYTES :])
    return bool(decoder.getstate()[0])
