"""Converts ids to text, one at a time, and finds the strings that end a completion."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.sched.plan import IntArray

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream

# number of earlier ids that influence how the next id is decoded (a leading space, a split character)
CONTEXT_TOKENS = 8
REPLACEMENT = "\ufffd"  # decoders write it for bytes that are not (yet) a character


class Detokenizer:
    """Streams the text of one completion. Incomplete characters are held back until their last token."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] | IntArray, *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = [int(token) for token in prompt_token_ids[-CONTEXT_TOKENS:]]
        self._held: list[int] = []
        self._stream = self._open_stream()

    def add(self, token_id: int) -> str:
        """Return the text that became certain with this token: often a word, or empty."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the stream refuses decoders that rewrite earlier text; start a new one after it
            return self.flush()
        if text is None:
            return ""
        self._context, self._held = (self._context + self._held)[-CONTEXT_TOKENS:], []
        return str(text)

    def flush(self) -> str:
        """Return the text that was held back, including incomplete characters, and hold nothing back any more."""
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

        # With a context that ends inside a character, the stream would return that character again.
        if self._decode(self._context).endswith(REPLACEMENT):
            self._context = []
        return DecodeStream(ids=list(self._context), skip_special_tokens=self._skip)


class StopStrings:
    """Finds stop strings in one growing text, even if they span tokens. A shallow copy can search another text.

    `include`: a stop string stays in the text. An Aho-Corasick automaton finds what may begin a stop string. Each
    character takes the same time, however many strings there are and however long they are.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._next: list[dict[str, int]] = [{}]  # transitions of each state; a state is a prefix of a stop string
        self._fallback = [0]  # for each state, the longest shorter prefix that is its suffix
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
        self._num_read = 0  # characters of the text that `_state` has read
        self._start = 0

    def skip(self, num_characters: int) -> None:
        """Ignore the first `num_characters` of the text. Call it before the rest is read."""
        self._start = self._num_read = num_characters

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """Return the first stop string that ends in the last `num_new` characters of `text`; None without one.

        Returns with it the length to which to cut the text.
        """
        if not num_new:
            return None
        known = len(text) - num_new
        places = ((text.find(stop, max(self._start, known - len(stop) + 1)), stop) for stop in self._stops)
        at, stop = min((place for place in places if place[0] >= 0), key=itemgetter(0), default=(-1, ""))
        if not stop:
            return None
        if self._include:
            at += len(stop)
        return stop, at

    def num_undecided(self, text: str) -> int:
        """Return the number of characters at the end of `text` that may begin a stop string and must be held back.

        `text` is the text of the last call, possibly extended. Only new characters are read.
        """
        if self._include or not self._stops:
            return 0
        for character in text[self._num_read :]:
            self._state = self._step(self._state, character)
        self._num_read = len(text)
        state = self._state
        if self._length[state] == self._longest:  # no further text extends the longest stop string
            state = self._fallback[state]
        return self._length[state]

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._fallback[state]
        return self._next[state][character]
