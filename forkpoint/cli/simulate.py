"""`forkpoint simulate`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from forkpoint.checks import Bounds, Checker
from forkpoint.cli.result_file import ResultFile
from forkpoint.config import GIB, MAX_HOST_GIB, SchedulerConfig, checked
from forkpoint.errors import ConfigError
from forkpoint.routing.router import ROUTERS
from forkpoint.sim.cases import Case, CaseResult, SystemFactory, run_cases
from forkpoint.sim.cost import H200
from forkpoint.sim.engine_replica import DISK_RATE
from forkpoint.sim.named_systems import ENGINE, make_system
from forkpoint.sim.readers import read_trace
from forkpoint.sim.shape import SHAPES, ModelShape, find_shape
from forkpoint.sim.table import case_rows, markdown
from forkpoint.sim.trace import Trace
from forkpoint.sim.workload import WORKLOADS, make_workload

GB: Final = 10**9
MAX_REPLICAS: Final = 4096
SCALES: Final = Bounds(0.0, 1e9)
_CHECK: Final = Checker(ConfigError)


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forkpoint simulate`."""
    _add_trace_options(parser)
    where = parser.add_argument_group("engine")
    _add_engine_options(where)
    _add_tier_options(where)
    how = parser.add_argument_group("run")
    how.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="INT", help="processes (default: all CPUs)"
    )
    how.add_argument("--json", type=Path, metavar="FILE", help="write all results")


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("traces")
    what.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        help=f"a file, or a synthetic workload such as chat:sessions=50 ({', '.join(WORKLOADS)}); "
        "FILE@limit=1000,sessions=0.5,max_tokens=100000 reads only that many requests (or conversations), replays a "
        "share of the sessions, and leaves out longer requests and those that follow them",
    )
    what.add_argument(
        "--arrival-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="factor on the times between arrivals (default: 1)",
    )
    what.add_argument("--think-scale", type=float, default=1.0, metavar="X", help="factor on think times (default: 1)")


def _add_engine_options(where: argparse._ArgumentGroup) -> None:
    where.add_argument(
        "--model", default="qwen3.5-9b", help=f"{', '.join(SHAPES)}, a model folder or a hub id (default: %(default)s)"
    )
    where.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "fp8"),
        default="auto",
        help="dtype of keys and values (default: auto)",
    )
    where.add_argument(
        "--mamba-ssm-cache-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the states (default: float32)",
    )
    where.add_argument(
        "--quantization", choices=("fp8",), help="format of the weights; default: that of a model folder"
    )
    where.add_argument(
        "--memory",
        default="32",
        metavar="GIB",
        help="memory of an engine for keys, values and states, or several such as 8,16,32 (default: 32)",
    )
    where.add_argument(
        "--systems",
        default=ENGINE,
        help=f"systems separated by ';': {ENGINE}, {ENGINE}:capture=NAME,eviction=NAME; with drafts also "
        f"num_speculative_tokens=3,acceptance_length=2.4 (default: {ENGINE})",
    )
    where.add_argument("--replicas", type=int, default=1, metavar="INT", help="number of engines (default: 1)")
    where.add_argument("--router", choices=ROUTERS, default=ROUTERS[0], help=f"(default: {ROUTERS[0]})")
    where.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, metavar="INT", help="tokens of a step (default: 8192)"
    )
    where.add_argument("--max-inter-token-latency-ms", type=int, metavar="INT", help="limit of a step (default: none)")
    where.add_argument("--max-num-seqs", type=int, default=256, metavar="INT", help="running requests (default: 256)")


def _add_tier_options(where: argparse._ArgumentGroup) -> None:
    where.add_argument(
        "--host-memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help=f"size of a host tier, for entries that memory cannot keep; of {ENGINE} only (default: none)",
    )
    where.add_argument(
        "--host-rate",
        type=float,
        default=H200.host_bandwidth / GB,
        metavar="GB/S",
        help="speed of the host tier's copies, which delay steps (default: 50, as over PCIe 5)",
    )
    where.add_argument(
        "--disk-memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help=f"size of a disk tier, below the host tier or the memory; of {ENGINE} only (default: none)",
    )
    where.add_argument(
        "--disk-rate",
        type=float,
        default=DISK_RATE / GB,
        metavar="GB/S",
        help="speed of the disk, which no step waits for (default: 6, as a drive of PCIe 4)",
    )


def simulate(options: argparse.Namespace) -> int:
    """Replay each trace with each system and amount of memory, print a table, and write `--json`. Return 0.

    Raises ConfigError or TraceError.
    """
    file = ResultFile(options.json)
    results = run(make_cases(options, read_traces(options), make_system), options.jobs)
    show(case_rows(results), results, file)
    return 0


def read_traces(options: argparse.Namespace) -> list[Trace]:
    """Return the traces that the options name. Raises ConfigError (also for an empty one) or TraceError."""
    if not options.traces:
        raise ConfigError("no trace was given; give files, or synthetic workloads such as chat or rag:documents=20")
    for name in ("arrival_scale", "think_scale"):
        _CHECK.number(name, getattr(options, name), SCALES)
    return [_trace(name, options) for name in options.traces]


def make_cases(options: argparse.Namespace, traces: Sequence[Trace], factory: SystemFactory) -> list[Case]:
    """Return a case per trace, amount of memory and system (which `factory` makes by name). Raises ConfigError."""
    _CHECK.integer("replicas", options.replicas, 1, MAX_REPLICAS)
    scheduler, shape = read_scheduler(options), _shape(options)
    host_memory = _CHECK.number("host_memory", options.host_memory, Bounds(0.0, MAX_HOST_GIB))
    rate = _CHECK.number("host_rate", options.host_rate, Bounds(0.0, 1e6, above=True))
    tiers = {"host_memory": host_memory}
    tiers["disk_memory"] = _CHECK.number("disk_memory", options.disk_memory, Bounds(0.0, MAX_HOST_GIB))
    disk_rate = _CHECK.number("disk_rate", options.disk_rate, Bounds(0.0, 1e6, above=True))
    if tiers["disk_memory"]:
        tiers["disk_rate"] = disk_rate
    device = replace(H200, host_bandwidth=rate * GB)
    return [
        Case(
            trace,
            shape,
            device,
            with_tiers(system, tiers),
            memory,
            scheduler,
            options.replicas,
            options.router,
            factory,
        )
        for trace in traces
        for memory in _memory_bytes(options.memory)
        for system in options.systems.split(";")
    ]


def with_tiers(system: str, tiers: Mapping[str, float]) -> str:
    """Return the system's name with these tiers in GiB (those of 0 left out), where it names no value of its own.

    Systems other than the engine have no tiers and keep their name.
    """
    head, _, own = system.partition(":")
    if head != ENGINE:
        return system
    named = [f"{name}={value:.12g}" for name, value in tiers.items() if value and f"{name}=" not in own]
    options = ",".join(filter(None, (own, *named)))
    if not options:
        return system
    return f"{head}:{options}"


def run(cases: Sequence[Case], jobs: int) -> list[CaseResult]:
    """Simulate the cases in `jobs` processes, with a progress bar on a terminal."""
    with show_progress(sum(len(case.trace.requests) for case in cases)) as progress:
        return run_cases(cases, jobs, progress)


def show(rows: Sequence[Sequence[str]], results: Sequence[CaseResult], file: ResultFile) -> None:
    """Print the rows as a table, and write all results to the file. Raises ConfigError if that fails."""
    print(markdown(rows))
    file.write([result.as_json() for result in results])


def read_scheduler(options: argparse.Namespace) -> SchedulerConfig:
    """Return the scheduler's options. Raises ConfigError for values that it does not allow."""
    return checked(
        SchedulerConfig(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_inter_token_latency_ms=options.max_inter_token_latency_ms,
        )
    )


def _trace(name: str, options: argparse.Namespace) -> Trace:
    name, given = _trace_options(name)
    path, first = Path(name), name.partition(":")[0]
    made_up = not path.exists() and first == Path(first).stem  # trace files are named with a folder or a suffix
    trace = make_workload(name) if made_up else read_trace(path, given.get("limit"))
    if "max_tokens" in given:
        trace = trace.within(given["max_tokens"])
    if given.get("sessions", 1) < 1:
        trace = trace.sample(given["sessions"])
    if not trace.requests:
        raise ConfigError(f"nothing is left of trace {name}; read more of it, or leave less out")
    return trace.scaled(options.arrival_scale, options.think_scale)


def _trace_options(name: str) -> tuple[str, dict[str, Any]]:
    """Split `FILE@limit=1000,sessions=0.5` into the file and its options. Raises ConfigError for unknown ones."""
    kinds: dict[str, type] = {"limit": int, "sessions": float, "max_tokens": int}
    given: dict[str, Any] = {}
    name, _, own = name.partition("@")
    for part in filter(None, own.split(",")):
        key, _, value = part.partition("=")
        try:
            given[key] = kinds[key](value)
        except (KeyError, ValueError):
            raise ConfigError(f"trace option {part!r} is not known; give {', '.join(kinds)} and a number") from None
    return name, given


def _shape(options: argparse.Namespace) -> ModelShape:
    name = options.model
    dtypes = options.kv_cache_dtype, options.mamba_ssm_cache_dtype, options.quantization
    if "/" not in name and not Path(name).is_dir():
        return find_shape(name).kept_as(*dtypes)
    from forkpoint.cli.model_shape import read_shape
    from forkpoint.engine.hub import model_folder

    return replace(read_shape(Path(model_folder(name, weights=False)), *dtypes), name=Path(name).name)


def _memory_bytes(text: str) -> list[int]:
    try:
        sizes = [int(float(part) * GIB) for part in text.split(",")]
    except (ValueError, OverflowError):
        raise ConfigError(f"--memory {text!r} is not a list of numbers; give GiB, such as 8,16,32") from None
    if not 0 < min(sizes) <= max(sizes) <= MAX_HOST_GIB * GIB:
        raise ConfigError(f"--memory {text!r} is not allowed; give GiB above 0, at most {MAX_HOST_GIB:,}")
    return sizes


@contextmanager
def show_progress(num_requests: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar on a terminal by a number of ended requests."""
    with tqdm(total=num_requests, unit="req", file=sys.stderr, disable=None, mininterval=0.5) as bar:
        yield lambda count: bar.update(count) and None
