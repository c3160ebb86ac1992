"""A folder of tables and plots: hit rate and time to first token against memory, for several models and traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from forkpoint.config import SchedulerConfig
from forkpoint.sim.bound import ReuseProblem, clairvoyant_bound
from forkpoint.sim.chances import known_chances
from forkpoint.sim.cost import Device
from forkpoint.sim.endings import History
from forkpoint.sim.plots import Curve, write_plot
from forkpoint.sim.shape import KIMI_LINEAR, QWEN3_5_9B, QWEN3_5_35B, WEIGHT_BYTES, ModelShape
from forkpoint.sim.sweep import Case, CaseResult, run_cases, undisturbed_stays
from forkpoint.sim.systems import CLAIRVOYANT, ENGINE, PEERS
from forkpoint.sim.table import GIB, markdown
from forkpoint.sim.trace import Trace

MEMORY_SHARES: Final = (0.125, 0.25, 0.5, 0.75, 1.0)  # of what the weights leave
USABLE_SHARE: Final = 0.9  # of a device's memory, as gpu_memory_utilization's default
BOUND: Final = "bound"
KNOWN: Final = "known chances"
GAPS: Final = ("gap closed to clairvoyant", "to the bound")
HALF: Final = "half of it to the bound"
HEADINGS: Final = MappingProxyType({CLAIRVOYANT: "clairvoyant"})


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """What the report covers."""

    traces: tuple[Trace, ...]
    device: Device
    scheduler: SchedulerConfig
    jobs: int
    shapes: tuple[ModelShape, ...] = (QWEN3_5_9B, QWEN3_5_35B, KIMI_LINEAR)
    systems: tuple[str, ...] = (ENGINE, *PEERS, CLAIRVOYANT)

    def sizes(self, shape: ModelShape) -> list[int]:
        """Memory for keys, values and states: shares of what the weights leave, in whole quarters of a GiB."""
        weights = WEIGHT_BYTES * (shape.num_weights + shape.num_expert_weights + 2 * shape.head_weights)
        room = USABLE_SHARE * self.device.memory_bytes - weights
        return [max(1, round(4 * room * share / GIB)) * GIB // 4 for share in MEMORY_SHARES]

    def case(self, trace: Trace, shape: ModelShape, system: str, memory_bytes: int) -> Case:
        return Case(trace, shape, self.device, system, memory_bytes, self.scheduler)

    def cases(self) -> list[Case]:
        """Every model, trace, size and system."""
        return [
            self.case(trace, shape, system, memory)
            for shape in self.shapes
            for trace in self.traces
            for memory in self.sizes(shape)
            for system in self.systems
        ]

    @property
    def num_requests(self) -> int:
        """Of all cases, and of the runs without want of room that `known_chances` goes by."""
        runs = len(self.shapes) * (len(MEMORY_SHARES) * len(self.systems) + 1)
        return runs * sum(len(trace.requests) for trace in self.traces)


@dataclass(frozen=True, slots=True)
class Panel:
    """One model on one trace: a result for every size and system, and by size the bound on the hit rate and, for traces
    whose requests share anything, what an ideal cache reaches that knows the chances of return."""

    shape: ModelShape
    trace: Trace
    sizes: tuple[int, ...]
    results: dict[tuple[int, str], CaseResult]
    bounds: dict[int, float]
    known: dict[int, float]

    def best_peer(self, size: int) -> CaseResult:
        """The emulated peer of the highest hit rate."""
        peers = [self.results[size, system] for system in PEERS if (size, system) in self.results]
        return max(peers, key=lambda result: result.hit_rate)

    def gap_closed(self, size: int, limit: float) -> float | None:
        """How much of the way from the best peer to `limit` the engine goes; None where there is none."""
        peer = self.best_peer(size).hit_rate
        return (self.results[size, ENGINE].hit_rate - peer) / (limit - peer) if limit - peer > 1e-3 else None

    def half_way(self, size: int) -> str:
        """Whether the engine closes half the gap from the best peer to the bound; if it does not, whether the ideal
        cache that knows the chances does."""
        middle = (self.best_peer(size).hit_rate + self.bounds[size]) / 2
        if self.results[size, ENGINE].hit_rate >= middle:
            return "yes"
        return f"no, nor do {KNOWN}" if self.known[size] < middle else "no"

    def gaps_closed(self, size: int) -> list[str]:
        """The same as text, to what foresight reaches in the simulator and to the bound."""
        limits = (self.results[size, CLAIRVOYANT].hit_rate, self.bounds[size])
        return ["-" if share is None else f"{share:.0%}" for share in (self.gap_closed(size, x) for x in limits)]


def write_report(plan: ReportPlan, folder: Path, progress: Callable[[int], None] | None = None) -> None:
    """Simulate everything; write README.md, results.json and a plot for each model and trace to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    results = run_cases(plan.cases(), plan.jobs, progress)
    found = {(r.model, r.trace, r.memory_bytes, r.system): r for r in results}
    problems = {trace.name: ReuseProblem.of(trace.by_arrival()) for trace in plan.traces}
    panels = [
        _panel(plan, shape, trace, problems[trace.name], found, progress)
        for shape in plan.shapes
        for trace in plan.traces
    ]
    lines = [result.as_json() for result in results]
    (folder / "results.json").write_text(json.dumps(lines, indent=1) + "\n")
    pages = [_panel_text(panel, plan.systems, _plot(panel, plan.systems, folder)) for panel in panels]
    head = [*_head(plan, problems), "", *_summary(panels)]
    (folder / "README.md").write_text("\n".join(head) + "\n\n" + "\n\n".join(pages) + "\n")


def _panel(
    plan: ReportPlan,
    shape: ModelShape,
    trace: Trace,
    problem: ReuseProblem,
    found: Mapping[tuple[str, str, int, str], CaseResult],
    progress: Callable[[int], None] | None,
) -> Panel:
    sizes, layout, tokens = tuple(plan.sizes(shape)), shape.layout, trace.num_prompt_tokens
    bounds = {
        size: clairvoyant_bound(problem, size, layout.block_bytes, layout.slot_bytes).worth / tokens for size in sizes
    }
    known: dict[int, float] = {}
    if problem.unlimited > 0:
        history = History.of(trace, undisturbed_stays(plan.case(trace, shape, ENGINE, sizes[-1]), progress))
        known = {size: known_chances(history, shape, size) / tokens for size in sizes}
    elif progress is not None:
        progress(len(trace.requests))  # nothing is shared, so that there is nothing to find out
    chosen = {(size, name): found[shape.name, trace.name, size, name] for size in sizes for name in plan.systems}
    return Panel(shape, trace, sizes, chosen, bounds, known)


def _head(plan: ReportPlan, problems: dict[str, ReuseProblem]) -> list[str]:
    rows = [("trace", "requests", "sessions", "prompt tokens", "output tokens", "reusable with unlimited memory")]
    for trace in plan.traces:
        reusable = problems[trace.name].unlimited / trace.num_prompt_tokens
        sessions = len({request.session for request in trace.requests})
        rows.append(
            (
                trace.name,
                f"{len(trace.requests):,}",
                f"{sessions:,}",
                f"{trace.num_prompt_tokens:,}",
                f"{trace.num_output_tokens:,}",
                f"{reusable:.1%}",
            )
        )
    return [
        "# Simulated: hit rate and time to first token against memory",
        "",
        "Written by `forkpoint simulate --report`; `docs/simulator.md` says what is simulated, and how well it holds.",
        f"Device: {plan.device.name} ({plan.device.flops / 1e12:g} TFLOP/s, {plan.device.bandwidth / 1e12:g} TB/s). "
        f"Budget: {plan.scheduler.max_num_batched_tokens} tokens a step, {plan.scheduler.max_num_seqs} rows. Hit rate: "
        "reused tokens over all prompt tokens; requests that a system refuses for want of room count as misses. "
        f"`{HEADINGS[CLAIRVOYANT]}`: the same engine, told all requests beforehand. `{BOUND}`: no policy whatever "
        f"exceeds it, not even one so told. `{KNOWN}`: what an ideal cache reaches that knows how likely conversations "
        f"go on, not which ones do (`forkpoint/sim/chances.py`). `gap closed`: how far {ENGINE} goes from the best "
        f"peer to the clairvoyant engine, and to the bound. `{HALF}`: at how many sizes it goes half of that way "
        "or more, and at how many of the others the ideal cache does not either.",
        "",
        markdown(rows),
    ]


def _summary(panels: Sequence[Panel]) -> list[str]:
    rows: list[tuple[str, ...]] = [("model", "trace", "best hit rate is ours", *GAPS, HALF, "best peers")]
    for panel in panels:
        wins = sum(panel.results[s, ENGINE].hit_rate >= panel.best_peer(s).hit_rate for s in panel.sizes)
        closed = zip(*(panel.gaps_closed(size) for size in panel.sizes), strict=True)
        peers = ", ".join(dict.fromkeys(panel.best_peer(size).system for size in panel.sizes))
        won = f"{wins} of {len(panel.sizes)} sizes"
        counts = Counter(panel.half_way(size) for size in panel.sizes) if panel.known else {}
        half = "; ".join(f"{answer}: {count}" for answer, count in counts.items()) or "-"
        rows.append((panel.shape.name, panel.trace.name, won, *(", ".join(shares) for shares in closed), half, peers))
    return [markdown(rows)]


def _panel_text(panel: Panel, systems: Sequence[str], plot: str | None) -> str:
    parts = [f"## {panel.shape.name}, {panel.trace.name}"]
    if plot is not None:
        parts.append(f"![{panel.shape.name} on {panel.trace.name}]({plot})")
    names = [HEADINGS.get(system, system) for system in systems]
    with_known = (KNOWN,) if panel.known else ()
    rows: list[tuple[str, ...]] = [("hit rate, memory GiB", *names, *with_known, BOUND, *GAPS)]
    for size in panel.sizes:
        rates = [panel.results[size, system].hit_rate for system in systems]
        rates += [limits[size] for limits in (panel.known, panel.bounds) if limits]
        rows.append((f"{size / GIB:g}", *(f"{rate:.1%}" for rate in rates), *panel.gaps_closed(size)))
    parts.append(markdown(rows))
    rows = [("TTFT mean / P95 s, memory GiB", *names)]
    for size in panel.sizes:
        found = [panel.results[size, system] for system in systems]
        rows.append((f"{size / GIB:g}", *(f"{r.ttft_mean_s:.2f} / {r.ttft_p95_s:.2f}" for r in found)))
    parts.append(markdown(rows))
    rows = [("states written GiB, refused, memory GiB", *names)]
    for size in panel.sizes:
        found = [panel.results[size, system] for system in systems]
        rows.append((f"{size / GIB:g}", *(f"{r.state_written_bytes / GIB:,.0f}, {r.num_refused}" for r in found)))
    parts.append(markdown(rows))
    return "\n\n".join(parts)


def _plot(panel: Panel, systems: Sequence[str], folder: Path) -> str | None:
    gib = [size / GIB for size in panel.sizes]

    def curve(system: str, values: dict[int, float]) -> Curve:
        name, heights = HEADINGS.get(system, system), [values[size] for size in panel.sizes]
        return Curve(name, gib, heights, limit=system in (CLAIRVOYANT, KNOWN, BOUND))

    def measured(value: Callable[[CaseResult], float]) -> list[Curve]:
        return [curve(s, {m: value(panel.results[m, s]) for m in panel.sizes}) for s in systems]

    hits = measured(lambda result: 100 * result.hit_rate)
    limits = {KNOWN: panel.known, BOUND: panel.bounds}
    hits += [curve(name, {m: 100 * rates[m] for m in panel.sizes}) for name, rates in limits.items() if rates]
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
