"""A folder of tables and plots: hit rate and time to first token against memory, for several models and traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forkpoint.config import SchedulerConfig
from forkpoint.sim.bound import ReuseProblem, clairvoyant_bound
from forkpoint.sim.cost import Device
from forkpoint.sim.plots import Curve, write_plot
from forkpoint.sim.shape import KIMI_LINEAR, QWEN3_5_9B, QWEN3_5_35B, WEIGHT_BYTES, ModelShape
from forkpoint.sim.sweep import Case, CaseResult, run_cases
from forkpoint.sim.systems import ENGINE, PEERS
from forkpoint.sim.table import GIB, markdown
from forkpoint.sim.trace import Trace

MEMORY_SHARES: Final = (0.125, 0.25, 0.5, 0.75, 1.0)  # of what the weights leave
USABLE_SHARE: Final = 0.9  # of a device's memory, as gpu_memory_utilization's default
BOUND: Final = "bound"


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """What the report covers."""

    traces: tuple[Trace, ...]
    device: Device
    scheduler: SchedulerConfig
    jobs: int
    shapes: tuple[ModelShape, ...] = (QWEN3_5_9B, QWEN3_5_35B, KIMI_LINEAR)
    systems: tuple[str, ...] = (ENGINE, *PEERS)

    def sizes(self, shape: ModelShape) -> list[int]:
        """Memory for keys, values and states: shares of what the weights leave, in whole quarters of a GiB."""
        weights = WEIGHT_BYTES * (shape.num_weights + shape.num_expert_weights + 2 * shape.head_weights)
        room = USABLE_SHARE * self.device.memory_bytes - weights
        return [max(1, round(4 * room * share / GIB)) * GIB // 4 for share in MEMORY_SHARES]

    def cases(self) -> list[Case]:
        """Every model, trace, size and system."""
        return [
            Case(trace, shape, self.device, system, memory, self.scheduler)
            for shape in self.shapes
            for trace in self.traces
            for memory in self.sizes(shape)
            for system in self.systems
        ]

    @property
    def num_requests(self) -> int:
        cases = len(self.shapes) * len(MEMORY_SHARES) * len(self.systems)
        return cases * sum(len(trace.requests) for trace in self.traces)


@dataclass(frozen=True, slots=True)
class Panel:
    """One model on one trace: a result for every size and system, and the bound on the hit rate by size."""

    shape: ModelShape
    trace: Trace
    sizes: tuple[int, ...]
    results: dict[tuple[int, str], CaseResult]
    bounds: dict[int, float]

    def best_peer(self, size: int) -> CaseResult:
        """The emulated peer of the highest hit rate."""
        peers = [result for (memory, system), result in self.results.items() if memory == size and system != ENGINE]
        return max(peers, key=lambda result: result.hit_rate)

    def gap_closed(self, size: int) -> float | None:
        """How much of the way from the best peer to the bound the engine goes; None where there is none."""
        peer, bound = self.best_peer(size).hit_rate, self.bounds[size]
        return (self.results[size, ENGINE].hit_rate - peer) / (bound - peer) if bound - peer > 1e-3 else None


def write_report(plan: ReportPlan, folder: Path, progress: Callable[[int], None] | None = None) -> None:
    """Simulate everything; write README.md, results.json and a plot for each model and trace to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    results = run_cases(plan.cases(), plan.jobs, progress)
    found = {(r.model, r.trace, r.memory_bytes, r.system): r for r in results}
    problems = {trace.name: ReuseProblem.of(trace.by_arrival()) for trace in plan.traces}
    panels = []
    for shape in plan.shapes:
        for trace in plan.traces:
            sizes = tuple(plan.sizes(shape))
            layout, problem = shape.layout, problems[trace.name]
            bounds = {
                size: clairvoyant_bound(problem, size, layout.block_bytes, layout.slot_bytes).worth
                / trace.num_prompt_tokens
                for size in sizes
            }
            chosen = {(s, name): found[shape.name, trace.name, s, name] for s in sizes for name in plan.systems}
            panels.append(Panel(shape, trace, sizes, chosen, bounds))
    lines = [result.as_json() for result in results]
    (folder / "results.json").write_text(json.dumps(lines, indent=1) + "\n")
    pages = [_panel_text(panel, plan.systems, _plot(panel, plan.systems, folder)) for panel in panels]
    head = [*_head(plan, problems), "", *_summary(panels)]
    (folder / "README.md").write_text("\n".join(head) + "\n\n" + "\n\n".join(pages) + "\n")


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
        "`bound`: no policy whatever exceeds it, even with all requests known beforehand. `gap closed`: how far "
        f"{ENGINE} goes from the best peer to the bound.",
        "",
        markdown(rows),
    ]


def _summary(panels: Sequence[Panel]) -> list[str]:
    rows = [("model", "trace", "sizes at which the best hit rate is ours", "gap closed, by size", "best peers")]
    for panel in panels:
        wins = sum(panel.results[s, ENGINE].hit_rate >= panel.best_peer(s).hit_rate for s in panel.sizes)
        closed = [panel.gap_closed(size) for size in panel.sizes]
        shares = ", ".join("-" if share is None else f"{share:.0%}" for share in closed)
        peers = ", ".join(dict.fromkeys(panel.best_peer(size).system for size in panel.sizes))
        rows.append((panel.shape.name, panel.trace.name, f"{wins} of {len(panel.sizes)}", shares, peers))
    return [markdown(rows)]


def _panel_text(panel: Panel, systems: Sequence[str], plot: str | None) -> str:
    parts = [f"## {panel.shape.name}, {panel.trace.name}"]
    if plot is not None:
        parts.append(f"![{panel.shape.name} on {panel.trace.name}]({plot})")
    rows: list[tuple[str, ...]] = [("hit rate, memory GiB", *systems, BOUND, "gap closed")]
    for size in panel.sizes:
        rates = [f"{panel.results[size, system].hit_rate:.1%}" for system in systems]
        closed = panel.gap_closed(size)
        share = "-" if closed is None else f"{closed:.0%}"
        rows.append((f"{size / GIB:g}", *rates, f"{panel.bounds[size]:.1%}", share))
    parts.append(markdown(rows))
    rows = [("TTFT mean / P95 s, memory GiB", *systems)]
    for size in panel.sizes:
        found = [panel.results[size, system] for system in systems]
        rows.append((f"{size / GIB:g}", *(f"{r.ttft_mean_s:.2f} / {r.ttft_p95_s:.2f}" for r in found)))
    parts.append(markdown(rows))
    rows = [("states written GiB, refused, memory GiB", *systems)]
    for size in panel.sizes:
        found = [panel.results[size, system] for system in systems]
        rows.append((f"{size / GIB:g}", *(f"{r.state_written_bytes / GIB:,.0f}, {r.num_refused}" for r in found)))
    parts.append(markdown(rows))
    return "\n\n".join(parts)


def _plot(panel: Panel, systems: Sequence[str], folder: Path) -> str | None:
    gib = [size / GIB for size in panel.sizes]
    hits = [Curve(s, gib, [100 * panel.results[m, s].hit_rate for m in panel.sizes]) for s in systems]
    hits.append(Curve(BOUND, gib, [100 * panel.bounds[m] for m in panel.sizes], dashed=True))
    means = [Curve(s, gib, [panel.results[m, s].ttft_mean_s for m in panel.sizes]) for s in systems]
    tails = [Curve(s, gib, [panel.results[m, s].ttft_p95_s for m in panel.sizes]) for s in systems]
    name = f"{panel.shape.name}-{panel.trace.name}.png".lower().replace("_", "-")
    title = f"{panel.shape.name}, {panel.trace.name}"
    written = write_plot(
        folder / name,
        title,
        "memory for keys, values and states, GiB",
        {"token hit rate, %": hits, "TTFT mean, s": means, "TTFT P95, s": tails},
    )
    return name if written else None
