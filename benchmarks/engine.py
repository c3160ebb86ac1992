"""The engine's numbers in one table, asked and measured: hits, half an arena, a long prefill, deterministic mode.

python -m benchmarks.engine
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.engine_loads import MixRun, Timing, draw_mix, half_pages, measure_long_prefill, run_mix
from benchmarks.engine_modes import LOADS, measure_modes
from benchmarks.hit_table import ROWS, TABLE_SPEC, RowResult, measure_row
from benchmarks.model131m import SHAPE_131M
from benchmarks.model131m import write_checkpoint as write_131m
from benchmarks.pages import wrapped
from benchmarks.peers.protocol import repository_root
from benchmarks.random_model import make_random_model
from benchmarks.rig import LoadedModel
from forkpoint.errors import ConfigError

MIXES = {"long": 12, "many": 40, "answers": 16, "mixed": 24}  # kind -> requests
REFERENCE_SLOT_BYTES = 49.1 * (1 << 20)  # of one state of Qwen3.5-9B
RUNNING = 8
BUDGET = 2048


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the printed table."""

    what: str
    asked: str
    measured: str
    holds: bool

    @property
    def cells(self) -> str:
        return f"| {self.what} | {self.asked} | {self.measured} | {'yes' if self.holds else '**no**'} |"


def hit_lines(folder: Path) -> Iterator[Line]:
    loaded = LoadedModel.load(make_random_model(folder / "table", TABLE_SPEC))
    for row in ROWS:
        yield _hit_line(measure_row(loaded, row), "")
    for row in ROWS:
        if row.tight_tokens:
            yield _hit_line(measure_row(loaded, row, tight=True), ", full arena")


def _hit_line(result: RowResult, note: str) -> Line:
    held_kib = result.num_checkpoints * REFERENCE_SLOT_BYTES / max(result.cached, 1) / 1024
    same = "the same outputs" if result.identical else "OTHER outputs"
    measured = (
        f"{result.cached}, {result.slot_bytes_copied} bytes copied, {same}; {result.num_checkpoints} checkpoints, "
        f"{held_kib:.0f} KiB per cached token"
    )
    return Line(result.row.name + note, f"{result.row.asked} tokens", measured, result.holds)


def half_arena_lines(folder: Path, repeats: int) -> Iterator[Line]:
    loaded = LoadedModel.load(make_random_model(folder / "table", TABLE_SPEC))
    for kind, count in MIXES.items():
        mix = draw_mix(kind, count, loaded.model.config.vocab_size)
        pages = half_pages(loaded, mix)
        ample: list[MixRun] = []
        half: list[MixRun] = []
        for _ in range(repeats):
            ample.append(run_mix(loaded, mix))
            half.append(run_mix(loaded, mix, pages))
        full, tight = (Timing.best([run.timing for run in runs]) for runs in (ample, half))
        same = all(run.outputs == ample[0].outputs for run in half)
        cpu = full.cpu_s / tight.cpu_s
        outputs = "the same outputs" if same else "OTHER outputs"
        measured = (
            f"{cpu:.2f}; {half[0].num_tokens / ample[0].num_tokens:.2f} x the tokens, {half[0].num_preemptions} "
            f"preemptions, {outputs}"
        )
        asked = "0.5 of the throughput"
        yield Line(f"half an arena, {count} requests: {kind}", asked, measured, same and cpu >= 0.5)


def long_prefill_lines(folder: Path, num_tokens: int) -> Iterator[Line]:
    spec = replace(TABLE_SPEC, max_position_embeddings=num_tokens + 64)
    loaded = LoadedModel.load(make_random_model(folder / f"table-{num_tokens}", spec), cpu_ops="auto")
    found = measure_long_prefill(loaded, num_tokens, RUNNING, BUDGET)
    quiet, during, step = (t.clock_s * 1e3 for t in (found.quiet, found.during, found.budget_step))
    measured = (
        f"{found.rise_cpu:.2f} steps (p99 {quiet:.0f} to {during:.0f} ms, a step alone {step:.0f} ms); a token for "
        f"each request in {found.smallest_share:.0%} of {found.num_steps} steps"
    )
    holds = found.rise_cpu <= 1.05 and found.smallest_share == 1
    asked = "p99 rises by 1.05 steps at most"
    yield Line(f"{num_tokens:,}-token prefill beside {RUNNING} decodes, budget {BUDGET}", asked, measured, holds)


def mode_lines(folder: Path, repeats: int) -> Iterator[Line]:
    model = folder / "131m"
    if not (model / "model.safetensors").exists():
        write_131m(model)
    for cpu_ops in ("cpp", "torch"):
        try:
            ratios = measure_modes(model, cpu_ops, repeats)
        except ConfigError as error:
            print(f"skipped: {error}", file=sys.stderr)
            continue
        for ratio in ratios:
            count, prompt, outputs = LOADS[ratio.load]
            measured = f"{ratio.cpu:.2f} ({ratio.default.clock_s:.2f} and {ratio.deterministic.clock_s:.2f} s)"
            what = f"deterministic, {cpu_ops} operators, {ratio.load} ({count} x {prompt} + {outputs} tokens)"
            yield Line(what, "0.7 of the throughput", measured, ratio.cpu >= 0.7)


PARTS = ("hits", "half", "prefill", "modes")


def measure(parts: Sequence[str], folder: Path, repeats: int, num_tokens: int) -> Iterator[Line]:
    """Yield the lines of the chosen parts as they are measured."""
    makers: dict[str, Callable[[], Iterable[Line]]] = {
        "hits": lambda: hit_lines(folder),
        "half": lambda: half_arena_lines(folder, repeats),
        "prefill": lambda: long_prefill_lines(folder, num_tokens),
        "modes": lambda: mode_lines(folder, repeats),
    }
    torch.set_num_threads(1)
    for part in parts:
        yield from makers[part]()


def write_page(path: Path, lines: Sequence[Line], command: str) -> None:
    """Write the page with the table and what is needed to repeat it."""
    shape = SHAPE_131M
    rows = "\n".join(line.cells for line in lines)
    spec = TABLE_SPEC
    path.parent.mkdir(parents=True, exist_ok=True)
    page = f"""# The engine on a CPU: asked and measured

Written by `{command}` on {machine.today()}, commit {machine.commit_hash()}.

- Machine: {machine.cpu_model()}, {machine.num_cpus()} CPUs, {machine.cpu_isa()}; 1 thread; load average at the end
  {machine.load_average():.1f}. Ratios compare the best CPU times of both sides, which take turns in one process.
- Hits, half an arena, long prefill: a random, state-sensitive Qwen3-Next-like model of {spec.num_layers} layers (one
  recurrent, one attention), hidden size {spec.hidden_size}, fp32. KiB per cached token count the checkpoints held when
  the request ended, with the states of Qwen3.5-9B.
- "Half an arena": the throughput with half of the memory, divided by the throughput with ample memory.
- Deterministic mode: its throughput divided by the default's, with the 131 M-parameter model ({shape.num_layers}
  layers, hidden size {shape.hidden_size}), bf16.

| case | asked | measured | holds |
|---|---|---|---|
{rows}
"""
    path.write_text(wrapped(page))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long-prompt", type=int, default=100_000, help="tokens of the long prefill")
    parser.add_argument("--models", type=Path, default=None, help="folder of the models; written when missing")
    page = repository_root() / "docs" / "benchmarks" / "engine_cpu.md"
    parser.add_argument("--page", type=Path, default=page, help="where the table is written")
    args = parser.parse_args(argv)
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        print("| case | asked | measured | holds |\n|---|---|---|---|")
        for line in measure(args.parts, args.models or Path(temporary), args.repeats, args.long_prompt):
            print(line.cells, flush=True)
            lines.append(line)
    options = ["--parts", *args.parts, "--repeats", str(args.repeats), "--long-prompt", str(args.long_prompt)]
    write_page(args.page, lines, shlex.join(["python", "-m", "benchmarks.engine", *options]))
    return 0 if all(line.holds for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
