"""The part of an answer's text that has come and is not read yet."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import regex

T = TypeVar("T")
# A reader that yields None when it needs more text, and returns a result.
Waits: TypeAlias = Generator[None, None, T]

# A possible call is held back until it is whole, and is read again as text if it is not a call. At most MAX_READ_AGAIN
# times the answer's length and MIN_READ_AGAIN characters are read again. After that no possible call is held back any
# more, so the cost stays linear.
MAX_READ_AGAIN, MIN_READ_AGAIN = 2, 16_384
SPACE = regex.compile(r"\s*")
SPACE_BEFORE_TAG = regex.compile(r"\s{0,200}")  # more is not held back
END = "@END@"  # means the end of the answer in the source of an `Ending`


@dataclass(frozen=True, slots=True)
class Ending:
    """A pattern in which END matches the end of the answer. While more text may come, END matches nothing."""

    open: regex.Pattern[str]
    final: regex.Pattern[str]

    @classmethod
    def compile(cls, source: str) -> Ending:
        return cls(regex.compile(source.replace(END, "(?!)")), regex.compile(source.replace(END, r"\Z")))


class Incoming:
    """Text that readers consume: they look at `text` from position `at` on, and move `at`.

    A reader that may have to give up sets a mark first, which keeps the text from there on, and rewinds to it later.
    `final`: no more text comes. `cut`: the length limit ended the answer, not the model. Positions are those in `text`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.final = False
        self.cut = False
        self._num_again = 0  # characters that are read again after rewinds
        self._start = 0  # position of `text` in the whole answer
        self._marks: list[int] = []  # positions in the whole answer
        self._kept: list[str] = []  # the text from the first mark to `_start`

    def append(self, text: str) -> None:
        if self._marks:
            self._kept.append(self.text[max(self._marks[0] - self._start, 0) : self.at])
        self.text = self.text[self.at :] + text
        self._start += self.at
        self.at = 0

    def finish(self, *, cut: bool) -> None:
        self.final, self.cut = True, cut

    @property
    def may_hold(self) -> bool:
        """Whether a possible call may be held back, although it has to be read again if it is not one."""
        return self._num_again <= MIN_READ_AGAIN + MAX_READ_AGAIN * (self._start + len(self.text))

    @property
    def position(self) -> int:
        """The number of characters of the whole answer that are read."""
        return self._start + self.at

    @property
    def num_unread(self) -> int:
        return len(self.text) - self.at

    @property
    def is_empty(self) -> bool:
        """Whether all text that has come is read."""
        return self.at == len(self.text)

    @property
    def is_cut_here(self) -> bool:
        """Whether the length limit ended the answer here. White space after this position does not count."""
        return self.cut and not self.text[self.at :].strip()

    def take(self, end: int) -> str:
        """Read and return the text from `at` up to position `end`."""
        taken = self.text[self.at : end]
        self.at = end
        return taken

    def mark(self) -> None:
        self._marks.append(self.position)

    def unmark(self) -> None:
        self._marks.pop()
        if not self._marks:
            self._kept = []

    def rewind(self) -> None:
        """Go back to the last mark and remove it."""
        again = self.position - self._marks[-1]
        if self._marks[-1] < self._start:
            kept = "".join(self._kept)
            self.text, self.at = kept + self.text, self.at + len(kept)
            self._start -= len(kept)
            self._kept = []
        self.at -= again
        self._num_again += again
        self.unmark()

    def more(self) -> Waits[bool]:
        """Wait until there is text to read, and return True; False at the end of the answer."""
        while self.is_empty and not self.final:
            yield None
        return not self.is_empty

    def matched(self, pattern: regex.Pattern[str] | Ending) -> Waits[regex.Match[str] | None]:
        """Return the match of `pattern` at the current position, without reading it; None if there is none.

        Waits if more text may decide.
        """
        while True:
            chosen = pattern
            if isinstance(chosen, Ending):
                chosen = chosen.final if self.final else chosen.open
            found = chosen.match(self.text, self.at, partial=not self.final)
            if found is None or not found.partial:
                return found
            yield None

    def skip_space(self) -> Waits[None]:
        while True:
            space = SPACE.match(self.text, self.at)
            assert space is not None
            self.at = space.end()
            if not self.is_empty or self.final:
                return
            yield None

    def skip_tag(self, tags: tuple[str, ...]) -> Waits[bool]:
        """Read white space and one of `tags` after it, and return True. If none follows, read nothing: False."""
        while True:
            space = SPACE_BEFORE_TAG.match(self.text, self.at)
            assert space is not None
            rest = self.text[space.end() : space.end() + max(map(len, tags))]
            for tag in tags:
                if rest.startswith(tag):
                    self.at = space.end() + len(tag)
                    return True
            if self.final or not any(tag.startswith(rest) for tag in tags):
                return False
            yield None
