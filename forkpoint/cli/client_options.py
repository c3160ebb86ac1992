"""Flags of the commands that talk to a server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forkpoint.bench.serve.dataset_options import DatasetOptions
from forkpoint.bench.serve.options import LoadOptions, ReportOptions, TargetOptions
from forkpoint.cli.options import add_option_group

DEFAULT_URL = "http://127.0.0.1:8000"
BENCH_GROUPS = (
    ("server", TargetOptions),
    ("load", LoadOptions),
    ("dataset", DatasetOptions),
    ("report", ReportOptions),
)


def add_url_options(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    group = parser.add_argument_group("server")
    shown = f" (default: {default})" if default is not None else "; then no --model is loaded here"
    group.add_argument("--url", default=default, metavar="URL", help="a running server, with or without /v1" + shown)
    group.add_argument("--model-name", metavar="TEXT", help="which of its models (default: the first)")
    group.add_argument("--api-key", metavar="TEXT", help="default: the environment's FORKPOINT_API_KEY")


def add_complete_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="may be given several times; default: standard input")
    add_url_options(parser, default=DEFAULT_URL)


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="PATH", help="JSON lines of requests")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="PATH", help="JSON lines of answers")
    parser.add_argument(
        "--max-concurrency", type=int, default=128, metavar="INT", help="requests in flight at most (default: 128)"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group = parser.add_argument_group("server")
    group.add_argument("--url", metavar="URL", help="a running server; then no --model is loaded here")
    group.add_argument("--api-key", metavar="TEXT", help="default: the environment's FORKPOINT_API_KEY")


def add_bench_serve(benches: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Adds `serve` to the benches, and returns its parser."""
    serve: argparse.ArgumentParser = benches.add_parser(
        "serve",
        help="load on a running server",
        description="Send a workload to a running server that speaks OpenAI's API, and measure latency, throughput "
        "and what its prefix cache did. Flags, definitions and results are those of `vllm bench serve`.",
    )
    for title, kind in BENCH_GROUPS:
        add_option_group(serve, title, kind)
    return serve
