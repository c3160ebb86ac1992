"""`forkpoint simulate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forkpoint.bench.result_file import ResultFile
from forkpoint.config import SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.sim.bound import ReuseProblem, clairvoyant_bound
from forkpoint.sim.cost import CostModel, Device, calibrate, find_device, read_steps
from forkpoint.sim.readers import read_trace
from forkpoint.sim.report import ReportPlan, write_report
from forkpoint.sim.shape import ModelShape, find_shape
from forkpoint.sim.sweep import Case, run_cases
from forkpoint.sim.table import case_table
from forkpoint.sim.trace import Trace
from forkpoint.sim.workload import WORKLOADS, make_workload

GIB = 1 << 30


def simulate(options: argparse.Namespace) -> int:
    """Replay traces and print a table; with --report write a folder of tables and plots."""
    if not options.traces:
        raise ConfigError("no trace was given; give files, or made-up workloads such as chat or rag:documents=20")
    scheduler = SchedulerConfig(
        max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs
    )
    file = None if options.json is None else ResultFile(options.json)
    traces = [_trace(name, options) for name in options.traces]
    device = _device(options)
    if options.report is not None:
        plan = ReportPlan(tuple(traces), device, scheduler, options.jobs)
        with _progress(plan.num_requests) as progress:
            write_report(plan, options.report, progress)
        return 0
    shape = _shape(options.model)
    cases = [
        Case(trace, shape, device, system, memory, scheduler, options.replicas, options.router)
        for trace in traces
        for memory in _memory_bytes(options.memory)
        for system in options.systems.split(";")
    ]
    with _progress(sum(len(case.trace.requests) for case in cases)) as progress:
        results = run_cases(cases, options.jobs, progress)
    bounds = _bounds(traces, shape, cases) if options.bound else {}
    print(case_table(results, bounds))
    if file is not None:
        file.write([result.as_json() for result in results])
    return 0


def _trace(name: str, options: argparse.Namespace) -> Trace:
    name, given = _trace_options(name, options)
    path = Path(name)
    made_up = name.partition(":")[0] in WORKLOADS and not path.exists()
    trace = make_workload(name) if made_up else read_trace(path, given["limit"])
    if given["max_tokens"] is not None:
        trace = trace.within(given["max_tokens"])
    if given["sessions"] < 1:
        trace = trace.sample(given["sessions"])
    if not trace.requests:
        raise ConfigError(f"nothing is left of trace {name}; read more of it, or leave less out")
    return trace.scaled(options.arrival_scale, options.think_scale)


def _trace_options(name: str, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """`FILE@limit=1000,sessions=0.5`: the file, and what the options say unless its name says otherwise."""
    kinds: dict[str, type] = {"limit": int, "sessions": float, "max_tokens": int}
    given: dict[str, Any] = {key: getattr(options, key) for key in kinds}
    name, _, own = name.partition("@")
    for part in filter(None, own.split(",")):
        key, _, value = part.partition("=")
        try:
            given[key] = kinds[key](value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"trace option {part!r} is not understood; give {', '.join(kinds)} and a number"
            ) from None
    return name, given


def _device(options: argparse.Namespace) -> Device:
    device = find_device(options.device)
    if options.steps is None:
        return device
    model, steps = read_steps(options.steps)
    return calibrate(CostModel(find_shape(model), device), steps).device


def _shape(name: str) -> ModelShape:
    folder = Path(name)
    if not folder.is_dir():
        return find_shape(name)
    from forkpoint.engine.shape import read_shape

    return read_shape(folder)


def _memory_bytes(text: str) -> list[int]:
    try:
        sizes = [int(float(part) * GIB) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--memory {text!r} is not a list of numbers; give GiB, such as 8,16,32") from None
    if min(sizes) <= 0:
        raise ConfigError(f"--memory {text!r} must be above 0")
    return sizes


def _bounds(traces: Sequence[Trace], shape: ModelShape, cases: Sequence[Case]) -> dict[tuple[str, int], float]:
    layout, found = shape.layout, {}
    for trace in traces:
        problem = ReuseProblem.of(trace.by_arrival())
        for memory, replicas in sorted({(case.memory_bytes, case.num_replicas) for case in cases}):
            bound = clairvoyant_bound(problem, memory * replicas, layout.block_bytes, layout.slot_bytes)
            found[trace.name, memory] = bound.worth / trace.num_prompt_tokens
    return found


@contextmanager
def _progress(num_requests: int) -> Iterator[Callable[[int], None]]:
    with tqdm(total=num_requests, unit="req", file=sys.stderr, disable=None, mininterval=0.5) as bar:
        yield lambda count: bar.update(count) and None
