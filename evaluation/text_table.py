"""Formats text in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], rule_after: Sequence[int]) -> str:
    """Align the first column to the left and the others to the right, with a rule after each row in `rule_after`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
        if number in rule_after:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)
