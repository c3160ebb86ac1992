"""`python -m studies.simulate`: `forkpoint simulate` with emulations of other engines, the bound and the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forkpoint.cli.result_file import ResultFile
from forkpoint.cli.simulate import (
    add_simulate_options,
    make_cases,
    read_scheduler,
    read_traces,
    run,
    show,
    show_progress,
)
from forkpoint.errors import ForkpointError
from forkpoint.sim.cases import Case, CaseResult
from forkpoint.sim.cost import H200, CostModel, Device
from forkpoint.sim.shape import find_shape
from forkpoint.sim.table import case_rows
from studies.bound import ReuseProblem, by_arrival, clairvoyant_bound, num_prompt_tokens
from studies.calibration import calibrate, read_steps
from studies.report import ReportPlan, write_report
from studies.systems import CLAIRVOYANT, EMULATIONS, make_system


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with the options of `forkpoint simulate` and three more."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.simulate",
        description="Replay request traces through forkpoint and through emulations of other engines. Systems are also "
        f"{', '.join(EMULATIONS)}, and {CLAIRVOYANT}, which knows all requests beforehand.",
    )
    add_simulate_options(parser)
    parser.add_argument("--steps", type=Path, metavar="FILE", help="fit the device to steps of benchmarks.step_times")
    parser.add_argument("--bound", action="store_true", help="add what no policy can exceed")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write tables and plots of all models there")
    return parser


def simulate(options: argparse.Namespace) -> int:
    """Replay traces and print a table; with --report write a folder of tables and plots."""
    file = ResultFile(options.json)
    device, traces = read_device(options), read_traces(options)
    if options.report is not None:
        plan = ReportPlan(tuple(traces), device, read_scheduler(options), options.jobs)
        with show_progress(plan.num_requests) as progress:
            write_report(plan, options.report, progress)
        return 0
    cases = [replace(case, device=device) for case in make_cases(options, traces, make_system)]
    results = run(cases, options.jobs)
    rows = case_rows(results)
    if options.bound:
        rows = with_bounds(rows, results, bounds_of(cases))
    show(rows, results, file)
    return 0


def read_device(options: argparse.Namespace) -> Device:
    """Return the H200, fitted to measured steps if some are given."""
    if options.steps is None:
        return H200
    model, steps = read_steps(options.steps)
    return calibrate(CostModel(find_shape(model), H200), steps).device


def with_bounds(
    rows: Sequence[list[str]], results: Sequence[CaseResult], bounds: Mapping[tuple[str, int], float]
) -> list[list[str]]:
    """Add a row with the bound after the last case of each trace and size."""
    keys, found = [(result.trace, result.memory_bytes) for result in results], [rows[0]]
    for index, (row, key) in enumerate(zip(rows[1:], keys, strict=True)):
        found.append(row)
        if key not in keys[index + 1 :]:
            found.append([*row[:2], "no policy exceeds", f"{bounds[key]:.1%}", *[""] * (len(row) - 4)])
    return found


def bounds_of(cases: Sequence[Case]) -> dict[tuple[str, int], float]:
    """Return the hit rate that no policy exceeds, by (trace, bytes)."""
    problems = {case.trace.name: ReuseProblem.of(by_arrival(case.trace)) for case in cases}
    found: dict[tuple[str, int], float] = {}
    for case in cases:
        key, layout = (case.trace.name, case.memory_bytes), case.shape.layout
        if key not in found:
            memory = case.memory_bytes * case.num_replicas
            bound = clairvoyant_bound(problems[case.trace.name], memory, layout.block_bytes, layout.slot_bytes)
            found[key] = bound.worth / num_prompt_tokens(case.trace)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Bad input is reported in one line."""
    try:
        return simulate(build_parser().parse_args(arguments))
    except ForkpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
