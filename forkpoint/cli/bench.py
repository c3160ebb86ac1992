"""`forkpoint bench latency` and `throughput`. What they run is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from forkpoint.bench.offline_options import LatencyOptions, ThroughputOptions
from forkpoint.bench.serve.dataset_options import DatasetOptions
from forkpoint.cli.model import with_model
from forkpoint.cli.options import add_engine_options, add_option_group, engine_options, option_values


def add_offline_benches(benches: argparse._SubParsersAction[Any]) -> None:
    """Add those that need no server."""
    latency = benches.add_parser("latency", help="how long one batch takes", description="How long one batch takes.")
    add_option_group(latency, "benchmark options", LatencyOptions)
    add_engine_options(latency)
    latency.set_defaults(command=_latency)

    text = "How many requests and tokens a second, all prompts at once."
    throughput = benches.add_parser("throughput", help="requests and tokens a second", description=text)
    add_option_group(throughput, "benchmark options", ThroughputOptions)
    add_option_group(throughput, "dataset options", DatasetOptions)
    add_engine_options(throughput)
    throughput.set_defaults(command=_throughput)


def _latency(arguments: argparse.Namespace) -> int:
    from forkpoint.bench.latency import run_latency

    options = LatencyOptions(**option_values(arguments, LatencyOptions))
    return _print(run_latency(options, with_model(engine_options(arguments)), sys.stderr.isatty()))


def _throughput(arguments: argparse.Namespace) -> int:
    from forkpoint.bench.throughput import run_throughput

    options = ThroughputOptions(**option_values(arguments, ThroughputOptions))
    dataset = DatasetOptions(**option_values(arguments, DatasetOptions))
    return _print(run_throughput(options, dataset, with_model(engine_options(arguments)), sys.stderr.isatty()))


def _print(lines: Iterable[str]) -> int:
    for line in lines:
        print(line, flush=True)
    return 0
