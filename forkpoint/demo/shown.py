"""Prints the demo's rows as aligned tables, and a conversation as a transcript."""

from __future__ import annotations

from collections.abc import Sequence

from forkpoint.demo.scenarios import Row

HEADER = ("scenario", "prompt tokens", "cached tokens", "TTFT on, ms", "TTFT off, ms", "speed-up", "identical")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned table. The last line counts identical outputs."""
    same = sum(row.identical for row in rows)
    lines = aligned([HEADER, *(_cells(row) for row in rows)])
    return "\n".join([*lines, "", f"{same} of {len(rows)} outputs identical with the cache on and off"])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of `cells`, titles first: the first column is aligned left, the others right."""
    columns = []
    for place, column in enumerate(zip(*cells, strict=True)):
        width = max(map(len, column))
        title, *rest = (cell.rjust(width) if place else cell.ljust(width) for cell in column)
        columns.append([title, "-" * width, *rest])
    return ["  ".join(line) for line in zip(*columns, strict=True)]


def shown_flag(flag: bool) -> str:
    if flag:
        return "yes"
    return "NO"


def _cells(row: Row) -> tuple[str, ...]:
    on, off = row.on.time_to_first_token_s, row.off.time_to_first_token_s
    return (
        row.scenario,
        f"{len(row.on.prompt.token_ids):,}",
        f"{row.on.num_cached_tokens:,}",
        f"{on * 1000:.0f}",
        f"{off * 1000:.0f}",
        f"{off / on:.1f}x",
        shown_flag(row.identical),
    )


def transcript(rows: Sequence[Row]) -> str:
    """Return the conversation with two lines for each turn. The last line counts right answers."""
    width = max(len(row.on.text) for row in rows)
    lines = [line for row in rows for line in _turn(row, width)]
    right = sum(row.right for row in rows)
    return "\n".join([*lines, "", f"{right} of {len(rows)} answers right"])


def _turn(row: Row, width: int) -> tuple[str, str]:
    on, off = row.on, row.off
    cache = f"{on.num_cached_tokens:,} of {len(on.prompt.token_ids):,} prompt tokens cached"
    times = (
        f"first token after {on.time_to_first_token_s * 1000:.0f} ms, uncached {off.time_to_first_token_s * 1000:.0f}"
    )
    wrong = "" if row.right else f"  (right: {row.turn.answer})"
    return f"user       {row.turn.text}", f"assistant  {on.text.ljust(width)}  [{cache}, {times} ms]{wrong}"
