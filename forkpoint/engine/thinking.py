"""Finds where the thinking of an answer ends and its content begins."""

from __future__ import annotations

from forkpoint.params import THINK, THINK_END, Thinking


class ContentFinder:
    """Finds where the content begins in one growing text.

    The content begins after `</think>` and the line breaks that follow it. Without thinking it begins with the text.
    `thinking`: the text begins inside thinking (`open`), has none (`none`), or may begin with `<think>`.
    """

    def __init__(self, thinking: Thinking) -> None:
        self.is_thinking = thinking == "open"  # whether the text so far is known to begin with thinking
        self._start: int | None = None
        if thinking == "none":
            self._start = 0
        self._num_searched = 0  # characters among which no `</think>` begins

    def find(self, text: str, *, is_whole: bool) -> int | None:
        """Return the number of characters before the content; None while that is unknown.

        `text` is the text of the last call, possibly extended. `is_whole`: the text is complete.
        """
        if self._start is None and not self.is_thinking:
            self._read_opening(text, is_whole)
        if self._start is None and self.is_thinking:
            self._read_thinking(text)
        return self._start

    def _read_opening(self, text: str, is_whole: bool) -> None:
        beginning = text.lstrip()
        if beginning.startswith(THINK):
            self.is_thinking = True
        elif is_whole or not THINK.startswith(beginning):
            self._start = 0

    def _read_thinking(self, text: str) -> None:
        end = text.find(THINK_END, self._num_searched)
        if end < 0:
            self._num_searched = max(0, len(text) - len(THINK_END) + 1)
            return
        self._num_searched = end
        start = end + len(THINK_END)
        rest = text[start:].lstrip("\n")
        if rest:
            self._start = len(text) - len(rest)
