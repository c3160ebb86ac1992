"""Formats pages of results like the documentation."""

from __future__ import annotations

import re
import textwrap
from itertools import groupby

WIDTH = 100
KEPT = re.compile(r"[|#]| {4}|\s*$")  # rows of tables, headings, commands, blanks
POINT = re.compile(r" *- ")


def wrapped(page: str) -> str:
    """Wrap the paragraphs and list items of a page at 100 columns. The page has no code fences."""
    num_points = 0

    def paragraph(line: str) -> int:
        nonlocal num_points
        num_points += bool(POINT.match(line)) or bool(KEPT.match(line))
        return num_points

    return "\n".join(_filled(list(lines)) for _, lines in groupby(page.split("\n"), paragraph))


def _filled(lines: list[str]) -> str:
    if KEPT.match(lines[0]):
        return "\n".join([lines[0], *([_filled(lines[1:])] if lines[1:] else [])])
    point = POINT.match(lines[0])
    return textwrap.fill(
        " ".join(line.strip() for line in lines),
        WIDTH,
        subsequent_indent=" " * (point.end() if point else 0),
        break_long_words=False,
        break_on_hyphens=False,
    )
