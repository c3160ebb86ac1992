"""Ids to text, one at a time, and the strings that end a completion."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.sched.plan import IntArray

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 8  # earlier ids that decide how the next one reads (a leading space, a split character)
REPLACEMENT = "\ufffd"  # how a decoder shows bytes that are not (yet) a character


class Detokenizer:
    """Streams the text of one completion. Text of an unfinished character waits for its last token."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] | IntArray, *, skip_special_tokens: bool
    ) -> None:
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
        self._context, self._held = (self._context + self._held)[-CONTEXT_TOKENS:], []
        return str(text)

    def flush(self) -> str:
        """The text still held back, incomplete characters included."""
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        text = after[len(before) :] if after.startswith(before) else self._decode(self._held)
        self._context, self._held = (self._context + self._held)[-CONTEXT_TOKENS:], []
        self._stream = self._open_stream()
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _open_stream(self) -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        # A context that ends inside a character would be told again as new text.
        usable = not self._decode(self._context).endswith(REPLACEMENT)
        self._context = self._context if usable else []
        return DecodeStream(ids=list(self._context), skip_special_tokens=self._skip)


class StopStrings:
    """Finds stop strings in one growing text, also those that span tokens; a shallow copy does the same in another.

    What may begin one is told by an automaton (Aho and Corasick's): each further character costs the same, however
    many strings there are and however long they get.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._next: list[dict[str, int]] = [{}]  # by state, which is a beginning of a stop string
        self._fallback = [0]  # the longest other beginning with which that one ends
        self._length = [0]
        for stop in self._stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._fallback.append(0)
                    self._length.append(self._length[state] + 1)
                state = self._next[state][character]
        self._longest = max(self._length)
        for state in sorted(range(1, len(self._next)), key=self._length.__getitem__):
            for character, longer in self._next[state].items():
                self._fallback[longer] = self._step(self._fallback[state], character)
        self._state = 0
        self._num_read = 0  # characters of the text that `_state` is about
        self._start = 0

    def skip(self, num_characters: int) -> None:
        """Ignore the first `num_characters` of the text; to be called before any of the rest is read."""
        self._start = self._num_read = num_characters

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """Return the first stop string that ends in the last `num_new` characters of `text`, and where to cut there."""
        if not num_new:
            return None
        known = len(text) - num_new
        places = ((text.find(stop, max(self._start, known - len(stop) + 1)), stop) for stop in self._stops)
        at, stop = min((place for place in places if place[0] >= 0), key=itemgetter(0), default=(-1, ""))
        return (stop, at + len(stop) if self._include else at) if stop else None

    def num_undecided(self, text: str) -> int:
        """Characters at the end of `text` that may turn out to begin a stop string, and must not be shown: those of
        the longest beginning, shorter than the longest stop string, with which it ends.

        `text` is that of the last call, and more; what is new is all that is looked at.
        """
        if self._include or not self._stops:
            return 0
        for character in text[self._num_read :]:
            self._state = self._step(self._state, character)
        self._num_read = len(text)
        is_whole = self._length[self._state] == self._longest
        return self._length[self._fallback[self._state] if is_whole else self._state]

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._fallback[state]
        return self._next[state][character]
