"""The demo's rows as aligned tables."""

from __future__ import annotations

from collections.abc import Sequence

from forkpoint.demo.scenarios import Row

HEADER = ("scenario", "prompt tokens", "cached tokens", "TTFT on, ms", "TTFT off, ms", "speed-up", "identical")


def table(rows: Sequence[Row]) -> str:
    """Text columns left, numbers right; the last line counts identical outputs."""
    same = sum(row.identical for row in rows)
    lines = aligned([HEADER, *(_cells(row) for row in rows)])
    return "\n".join([*lines, "", f"{same} of {len(rows)} outputs identical with the cache on and off"])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first one has the titles."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [_line(line, widths) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    on, off = row.on.time_to_first_token_s, row.off.time_to_first_token_s
    return (
        row.scenario,
        f"{len(row.on.prompt.token_ids):,}",
        f"{row.on.num_cached_tokens:,}",
        f"{on * 1000:.0f}",
        f"{off * 1000:.0f}",
        f"{off / on:.1f}x",
        "yes" if row.identical else "NO",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest])
