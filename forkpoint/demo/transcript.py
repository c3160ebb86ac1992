"""A conversation as it was said, with what the cache did at each turn."""

from __future__ import annotations

from collections.abc import Sequence

from forkpoint.demo.scenarios import Row


def transcript(rows: Sequence[Row]) -> str:
    """Two lines a turn; the last line counts right answers."""
    width = max(len(row.on.text) for row in rows)
    lines = [line for row in rows for line in _turn(row, width)]
    right = sum(row.right for row in rows)
    return "\n".join([*lines, "", f"{right} of {len(rows)} answers right"])


def _turn(row: Row, width: int) -> tuple[str, str]:
    on, off = row.on, row.off
    cache = f"{on.num_cached_tokens:,} of {len(on.prompt.token_ids):,} prompt tokens cached"
    times = (
        f"first token after {on.time_to_first_token_s * 1000:.0f} ms, without {off.time_to_first_token_s * 1000:.0f}"
    )
    wrong = "" if row.right else f"  (right: {row.turn.answer})"
    return f"user       {row.turn.text}", f"assistant  {on.text.ljust(width)}  [{cache}, {times} ms]{wrong}"
