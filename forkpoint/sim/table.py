"""Results as a table in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from forkpoint.config import GIB
from forkpoint.sim.cases import CaseResult

HOST: Final = "from the host tier"
DISK: Final = "from the disk tier"
COLUMNS: Final[tuple[tuple[str, Callable[[CaseResult], str]], ...]] = (
    ("trace", lambda r: r.trace),
    ("memory GiB", lambda r: f"{r.memory_bytes / GIB:g}"),
    ("system", lambda r: r.system),
    ("hit rate", lambda r: f"{r.hit_rate:.1%}"),
    ("keys and values alone", lambda r: f"{r.kv_hit_tokens / r.prompt_tokens:.1%}"),
    (HOST, lambda r: f"{r.restored_tokens / r.prompt_tokens:.1%}"),
    (DISK, lambda r: f"{r.read_tokens / r.prompt_tokens:.1%}"),
    ("TTFT mean s", lambda r: f"{r.ttft_mean_s:.3f}"),
    ("P95 s", lambda r: f"{r.ttft_p95_s:.3f}"),
    ("prompt tok/s", lambda r: f"{r.prompt_tokens_per_s:,.0f}"),
    ("output tok/s", lambda r: f"{r.output_tokens_per_s:,.0f}"),
    ("written GiB (states)", lambda r: f"{_written(r) / GIB:,.0f} ({r.state_written_bytes / GIB:,.0f})"),
    ("evicted states / blocks", lambda r: f"{r.states_evicted:,} / {r.blocks_evicted:,}"),
    ("preempted", lambda r: f"{r.num_preemptions:,}"),
    ("refused", lambda r: f"{r.num_refused:,}"),
    ("lost tokens", lambda r: ", ".join(f"{reason} {tokens:,}" for reason, tokens in r.lost_tokens.items() if tokens)),
)


def case_rows(results: Iterable[CaseResult]) -> list[list[str]]:
    """Return the column titles, then a row for each case. Leave out the columns of tiers that restored nothing."""
    results = list(results)
    used = {HOST: any(r.restored_tokens for r in results), DISK: any(r.read_tokens for r in results)}
    columns = [(title, cell) for title, cell in COLUMNS if used.get(title, True)]
    return [[title for title, _ in columns], *([cell(result) for _, cell in columns] for result in results)]


def _written(result: CaseResult) -> int:
    return result.kv_written_bytes + result.state_written_bytes


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table with padded columns. The first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
