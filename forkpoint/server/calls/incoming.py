"""The text of an answer that has come and is not read yet."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import regex

T = TypeVar("T")
# A reader that yields None when it needs more text, and returns a result.
Waits: TypeAlias = Generator[None, None, T]

# A call that is not certain is held back until it is whole, and read again if it is none. This many times the answer's
# length, and this many characters, may be read again. Then no such call is held back any more: the cost stays linear.
MAX_READ_AGAIN, MIN_READ_AGAIN = 2, 16_384
SPACE = regex.compile(r"\s*")
END = "@END@"  # stands for the end of the answer in the source of an `Ending`


@dataclass(frozen=True, slots=True)
class Ending:
    """A pattern in which END matches the end of the answer, and nothing else while more text may come."""

    open: regex.Pattern[str]
    final: regex.Pattern[str]

    @classmethod
    def compile(cls, source: str) -> Ending:
        return cls(regex.compile(source.replace(END, "(?!)")), regex.compile(source.replace(END, r"\Z")))


class Incoming:
    """Readers look at `text` from position `at` on and move `at`. A reader that may turn out to be wrong marks its
    beginning, which keeps the text from there on, and rewinds.

    `final`: no more text comes. `cut`: it ended because of its length, not because the model ended it.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.final = False
        self.cut = False
        self._num_again = 0  # characters that were or will be read again
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
        """Whether text may be held back that has to be read again if it is not a call."""
        return self._num_again <= MIN_READ_AGAIN + MAX_READ_AGAIN * (self._start + len(self.text))

    @property
    def is_empty(self) -> bool:
        """Whether all that has come is read."""
        return self.at == len(self.text)

    @property
    def is_cut_here(self) -> bool:
        """Whether the answer's length ended it here; white space says nothing."""
        return self.cut and not self.text[self.at :].strip()

    def take(self, end: int) -> str:
        """Read up to position `end`."""
        taken = self.text[self.at : end]
        self.at = end
        return taken

    def mark(self) -> None:
        self._marks.append(self._start + self.at)

    def unmark(self) -> None:
        self._marks.pop()
        if not self._marks:
            self._kept = []

    def rewind(self) -> None:
        """Go back to the last mark and remove it."""
        again = self._start + self.at - self._marks[-1]
        if self._marks[-1] < self._start:
            kept = "".join(self._kept)
            self.text, self.at = kept + self.text, self.at + len(kept)
            self._start -= len(kept)
            self._kept = []
        self.at -= again
        self._num_again += again
        self.unmark()

    def matched(self, pattern: regex.Pattern[str] | Ending) -> Waits[regex.Match[str] | None]:
        """Match `pattern` at the current position, without reading it. Waits while more text may decide."""
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
        """Read white space and one of `tags` behind it; reads nothing if none of them follows."""
        while True:
            space = SPACE.match(self.text, self.at)
            assert space is not None
            rest = self.text[space.end() : space.end() + max(map(len, tags))]
            for tag in tags:
                if rest.startswith(tag):
                    self.at = space.end() + len(tag)
                    return True
            if self.final or not any(tag.startswith(rest) for tag in tags):
                return False
            yield None
