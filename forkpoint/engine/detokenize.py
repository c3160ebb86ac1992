"""Ids to text, one at a time, and the strings that end a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from forkpoint.engine.tokenizer import Tokenizer

CONTEXT_TOKENS = 8  # earlier ids that decide how the next one reads (a leading space, a split character)
REPLACEMENT = "\ufffd"  # how a decoder shows bytes that are not (yet) a character


class Detokenizer:
    """Streams the text of one completion. Text of an unfinished character waits for its last token."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = [int(token) for token in prompt_token_ids[-CONTEXT_TOKENS:]]
        self._held: list[int] = []
        self._stream = self._open_stream()

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; often one word, sometimes none."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the stream refuses a decoder that rewrites earlier text; start again behind it
            return self.flush()
        if text is None:
            return ""
        self._settle()
        return str(text)

    def flush(self) -> str:
        """The text still held back, incomplete characters included."""
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        text = after[len(before) :] if after.startswith(before) else self._decode(self._held)
        self._settle()
        self._stream = self._open_stream()
        return text

    def _settle(self) -> None:
        self._context = (self._context + self._held)[-CONTEXT_TOKENS:]
        self._held = []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _open_stream(self) -> DecodeStream:
        # A context that ends inside a character would be told again as new text.
        usable = not self._decode(self._context).endswith(REPLACEMENT)
        self._context = self._context if usable else []
        return DecodeStream(ids=list(self._context), skip_special_tokens=self._skip)


@dataclass(frozen=True, slots=True)
class StopHit:
    """The stop string found, and the length to which the text is cut."""

    stop: str
    length: int


class StopStrings:
    """Finds stop strings in growing text, also those that span tokens."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)

    def find(self, text: str, num_new: int) -> StopHit | None:
        """The first stop string that ends in the last `num_new` characters of `text`."""
        if not self._stops or not num_new:
            return None
        settled = len(text) - num_new
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, settled - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return None
        at, stop = best
        return StopHit(stop, at + len(stop) if self._include else at)

    def num_undecided(self, text: str) -> int:
        """Characters at the end of `text` that may turn out to begin a stop string, and must not be shown."""
        if self._include:
            return 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
