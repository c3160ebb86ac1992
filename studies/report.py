"""Writes a folder of tables and plots: hit rate and time to first token against memory, for several models and
traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.pages import wrapped
from forkpoint.config import GIB, SchedulerConfig
from forkpoint.sim.cases import Case, CaseResult, run_cases
from forkpoint.sim.cost import Device
from forkpoint.sim.shape import KIMI_LINEAR, QWEN3_5_9B, QWEN3_5_35B, WEIGHT_BYTES, ModelShape
from forkpoint.sim.table import markdown
from forkpoint.sim.trace import Trace
from studies.bound import ReuseProblem, by_arrival, clairvoyant_bound, num_prompt_tokens
from studies.plots import Curve, write_plot
from studies.systems import CLAIRVOYANT, EMULATIONS, ENGINE, make_system

MEMORY_SHARES: Final = (0.125, 0.25, 0.5, 0.75, 1.0)  # of what the weights leave
USABLE_SHARE: Final = 0.9  # of a device's memory, as gpu_memory_utilization's default
BOUND: Final = "bound"
HEADINGS: Final = MappingProxyType({CLAIRVOYANT: "clairvoyant"})


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """The contents of the report."""

    traces: tuple[Trace, ...]
    device: Device
    scheduler: SchedulerConfig
    jobs: int
    shapes: tuple[ModelShape, ...] = (QWEN3_5_9B, QWEN3_5_35B, KIMI_LINEAR)
    systems: tuple[str, ...] = (ENGINE, *EMULATIONS, CLAIRVOYANT)

    def sizes(self, shape: ModelShape) -> list[int]:
        """Return amounts of memory for keys, values and states: shares of what the weights leave, in whole quarters of
        a GiB."""
        weights = WEIGHT_BYTES * (shape.num_weights + shape.num_expert_weights + 2 * shape.head_weights)
        room = USABLE_SHARE * self.device.memory_bytes - weights
        return [max(1, round(4 * room * share / GIB)) * GIB // 4 for share in MEMORY_SHARES]

    def case(self, trace: Trace, shape: ModelShape, system: str, memory_bytes: int) -> Case:
        return Case(trace, shape, self.device, system, memory_bytes, self.scheduler, factory=make_system)

    def cases(self) -> list[Case]:
        """Return the cases of every model, trace, size and system."""
        return [
            self.case(trace, shape, system, memory)
            for shape in self.shapes
            for trace in self.traces
            for memory in self.sizes(shape)
            for system in self.systems
        ]

    @property
    def num_requests(self) -> int:
        """Return the number of requests of all cases."""
        runs = len(self.shapes) * len(MEMORY_SHARES) * len(self.systems)
        return runs * sum(len(trace.requests) for trace in self.traces)


@dataclass(frozen=True, slots=True)
class Panel:
    """One model on one trace: a result for every size and system, and for each size the bound on the hit rate."""

    shape: ModelShape
    trace: Trace
    sizes: tuple[int, ...]
    results: dict[tuple[int, str], CaseResult]
    bounds: dict[int, float]

    def best_emulation(self, size: int) -> CaseResult:
        """The emulation with the highest hit rate."""
        found = [self.results[size, system] for system in EMULATIONS if (size, system) in self.results]
        return max(found, key=lambda result: result.hit_rate)

    def least_p95(self, size: int) -> float:
        """The lowest 95th percentile of an emulation's time to first token, in seconds."""
        return min(r.ttft_p95_s for (s, name), r in self.results.items() if s == size and name in EMULATIONS)


def write_report(plan: ReportPlan, folder: Path, progress: Callable[[int], None] | None = None) -> None:
    """Simulate everything. Write README.md, results.json and a plot for each model and trace to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    results = run_cases(plan.cases(), plan.jobs, progress)
    found = {(r.model, r.trace, r.memory_bytes, r.system): r for r in results}
    problems = {trace.name: ReuseProblem.of(by_arrival(trace)) for trace in plan.traces}
    panels = [_panel(plan, shape, trace, problems[trace.name], found) for shape in plan.shapes for trace in plan.traces]
    lines = [result.as_json() for result in results]
    (folder / "results.json").write_text(json.dumps(lines, indent=1) + "\n")
    pages = [_panel_text(panel, _plot(panel, plan.systems, folder)) for panel in panels]
    head = [*_head(plan, problems), "", *_summary(panels)]
    (folder / "README.md").write_text(wrapped("\n".join(head) + "\n\n" + "\n\n".join(pages) + "\n"))


def _panel(
    plan: ReportPlan,
    shape: ModelShape,
    trace: Trace,
    problem: ReuseProblem,
    found: Mapping[tuple[str, str, int, str], CaseResult],
) -> Panel:
    sizes, layout, tokens = tuple(plan.sizes(shape)), shape.layout, num_prompt_tokens(trace)
    bounds = {
        size: clairvoyant_bound(problem, size, layout.block_bytes, layout.slot_bytes).worth / tokens for size in sizes
    }
    chosen = {(size, name): found[shape.name, trace.name, size, name] for size in sizes for name in plan.systems}
    return Panel(shape, trace, sizes, chosen, bounds)


def _head(plan: ReportPlan, problems: dict[str, ReuseProblem]) -> list[str]:
    rows = [("trace", "requests", "sessions", "prompt tokens", "output tokens", "reusable with unlimited memory")]
    for trace in plan.traces:
        reusable = problems[trace.name].unlimited / num_prompt_tokens(trace)
        sessions = len({request.session for request in trace.requests})
        rows.append(
            (
                trace.name,
                f"{len(trace.requests):,}",
                f"{sessions:,}",
                f"{num_prompt_tokens(trace):,}",
                f"{sum(request.output.num_tokens for request in trace.requests):,}",
                f"{reusable:.1%}",
            )
        )
    return [
        "# Simulated: hit rate and time to first token against memory",
        "",
        "Written by `python -m studies.simulate --report`. `docs/simulator.md` says what is simulated and how well it",
        "holds. `results.json` has every number of every system.",
        f"Device: {plan.device.name} ({plan.device.flops / 1e12:g} TFLOP/s, {plan.device.bandwidth / 1e12:g} TB/s).",
        f"Budget: {plan.scheduler.max_num_batched_tokens} tokens per step, {plan.scheduler.max_num_seqs} rows.",
        "The hit rate is reused tokens over all prompt tokens. A request that a system refuses for lack of room counts",
        f"as a miss. `{HEADINGS[CLAIRVOYANT]}` is the same engine with all requests known beforehand. `{BOUND}` is a",
        "rate that no policy can exceed. P95 is the 95th percentile of the time to first token, in seconds. Traces",
        "whose requests share nothing are left out of the table.",
        "",
        markdown(rows),
    ]


def _summary(panels: Sequence[Panel]) -> list[str]:
    head = ("model", "trace", "GiB", "best other engine", ENGINE, "clairvoyant", BOUND, "P95", "least P95 of others")
    rows: list[tuple[str, ...]] = [head]
    for panel in panels:
        for size in panel.sizes:
            if panel.bounds[size] == 0.0:
                continue  # nothing can be reused
            best, mine = panel.best_emulation(size), panel.results[size, ENGINE]
            foreseen = panel.results.get((size, CLAIRVOYANT))
            rows.append(
                (
                    panel.shape.name,
                    panel.trace.name,
                    f"{size / GIB:g}",
                    f"{best.hit_rate:.1%} ({best.system})",
                    f"{mine.hit_rate:.1%}",
                    f"{foreseen.hit_rate:.1%}" if foreseen else "-",
                    f"{panel.bounds[size]:.1%}",
                    f"{mine.ttft_p95_s:.2f}",
                    f"{panel.least_p95(size):.2f}",
                )
            )
    return [markdown(rows)]


def _panel_text(panel: Panel, plot: str | None) -> str:
    title = f"{panel.shape.name}, {panel.trace.name}"
    if plot is None:
        return f"## {title}"
    return f"## {title}\n\n![{title}]({plot})"


def _plot(panel: Panel, systems: Sequence[str], folder: Path) -> str | None:
    gib = [size / GIB for size in panel.sizes]

    def curve(system: str, values: dict[int, float]) -> Curve:
        name, heights = HEADINGS.get(system, system), [values[size] for size in panel.sizes]
        return Curve(name, gib, heights, limit=system in (CLAIRVOYANT, BOUND))

    def measured(value: Callable[[CaseResult], float]) -> list[Curve]:
        return [curve(s, {m: value(panel.results[m, s]) for m in panel.sizes}) for s in systems]

    hits = measured(lambda result: 100 * result.hit_rate)
    hits.append(curve(BOUND, {m: 100 * panel.bounds[m] for m in panel.sizes}))
    name = f"{panel.shape.name}-{panel.trace.name}.png".lower().replace("_", "-")
    title = f"{panel.shape.name}, {panel.trace.name}"
    written = write_plot(
        folder / name,
        title,
        "memory for keys, values and states, GiB",
        {
            "token hit rate, %": hits,
            "TTFT mean, s": measured(lambda result: result.ttft_mean_s),
            "TTFT P95, s": measured(lambda result: result.ttft_p95_s),
        },
    )
    return name if written else None
