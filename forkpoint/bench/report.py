"""Prints and writes results of `bench serve` under the names of `vllm bench serve`, with the cache's figures."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from forkpoint.bench.load import Outcome
from forkpoint.bench.options import LoadOptions, ReportOptions, TargetOptions
from forkpoint.errors import ConfigError

WIDTH = 50  # characters of a printed line
TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def lines(found: Mapping[str, Any], load: LoadOptions, report: ReportOptions) -> Iterator[str]:
    """Yield the printed lines of the figures `found` (of `figures`), without those that are None."""
    shown = {**found, "max_concurrency": load.max_concurrency, "request_rate": None}
    shown["max_concurrent_requests"] = float(found["max_concurrent_requests"])
    if not math.isinf(load.request_rate):
        shown["request_rate"] = float(load.request_rate)
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    for title, name in (
        ("Successful requests:", "completed"),
        ("Failed requests:", "failed"),
        ("Maximum request concurrency:", "max_concurrency"),
        ("Request rate configured (RPS):", "request_rate"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Request goodput (req/s):", "request_goodput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        yield from _line(title, shown[name])
    for metric in report.metrics:
        short, title = TITLES[metric]
        yield f"{title:-^{WIDTH}}"
        for key in ("mean", "median", *(f"p{rank:g}" for rank in report.percentiles)):
            yield from _line(f"{key.capitalize()} {short} (ms):", found[f"{key}_{metric}_ms"])
    if found["total_cached_tokens"] is not None:
        yield f"{'Prefix Cache':-^{WIDTH}}"
        yield from _line("Cached input tokens:", found["total_cached_tokens"])
        yield from _line("Share of input tokens cached (%):", 100 * found["cached_token_share"])
        for reason, count in found["requests_by_miss"].items():
            yield from _line(f"Not cached in full ({reason}):", count)
    yield "=" * WIDTH


def _line(title: str, value: float | None) -> Iterator[str]:
    if value is not None:
        yield f"{title:<40} {value:<10}" if isinstance(value, int) else f"{title:<40} {value:<10.2f}"


# (figure, the function that reads it from the outcome of an answered request, its value for a failed request)
DETAILS: Final[tuple[tuple[str, Callable[[Outcome], Any], Any], ...]] = (
    ("input_lens", lambda r: r.num_prompt_tokens, 0),
    ("output_lens", lambda r: r.answer.num_completion_tokens, 0),
    ("cached_lens", lambda r: r.num_cached_tokens, None),
    ("misses", lambda r: r.answer.miss, None),
    ("ttfts", lambda r: r.ttft_s, 0.0),
    ("itls", lambda r: r.answer.gaps_s, ()),
)


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return a list per figure with an entry per request, in the order sent; 0, empty or None if the request failed."""
    found = {name: [read(r) if r.error is None else failed for r in outcomes] for name, read, failed in DETAILS}
    return {
        **found,
        "start_times": [outcome.answer.start_s for outcome in outcomes],
        "generated_texts": [outcome.answer.text for outcome in outcomes],
        "errors": [outcome.error or "" for outcome in outcomes],
    }


def about_run(
    model: str, tokenizer: str, target: TargetOptions, load: LoadOptions, report: ReportOptions, now: datetime
) -> dict[str, Any]:
    """Return the run's parameters, which come first in the result. `metadata` may overwrite them."""
    return {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "backend": target.backend,
        "label": report.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        **{name: getattr(load, name) for name in ("num_prompts", "burstiness", "max_concurrency", "seed")},
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        **report.notes,
    }


def result_path(folder: Path, about: Mapping[str, Any], report: ReportOptions) -> Path:
    if report.result_filename is not None:
        name = report.result_filename
    else:
        together = "" if about["max_concurrency"] is None else f"-concurrency{about['max_concurrency']}"
        model = re.sub(r"[^\w.-]", "_", about["model_id"].rstrip("/").split("/")[-1])
        name = f"{about['label'] or about['backend']}-{about['request_rate']}qps{together}-{model}-{about['date']}.json"
    return folder / name


def require_folder(path: Path, filename: str | None) -> None:
    """Create the folder and its parents if absent. Raises ConfigError if the file (None: any) cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {path} cannot be created: {error.strerror}; give another --result-dir"
        ) from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"nothing can be written to {path}; give another --result-dir")
    if filename is not None and (path / filename).is_dir():
        raise ConfigError(f"{path / filename} is a folder; give another --result-filename")


def write_result(found: Mapping[str, Any], path: Path, *, append: bool) -> None:
    """Write `found` as one line of JSON, in place of the file's content or after it. Raises ConfigError on failure."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {path}: {error.strerror}") from error
