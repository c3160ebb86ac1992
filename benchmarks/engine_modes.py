"""Measures what `--deterministic` costs: both modes run the 131 M-parameter model in turns in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_loads import Mix, MixRun, Timing, run_mix
from benchmarks.rig import LoadedModel, random_ids

VOCAB = 32_768
LOADS: dict[str, tuple[int, int, int]] = {  # name -> requests, prompt tokens, output tokens
    "prefill-heavy": (2, 512, 2),
    "decode-heavy": (8, 64, 16),
}


@dataclass(frozen=True, slots=True)
class ModeRatio:
    """The best times of both modes under one load."""

    cpu_ops: str
    load: str
    default: Timing
    deterministic: Timing

    @property
    def clock(self) -> float:
        """Throughput of deterministic mode divided by that of the default mode, by wall-clock time."""
        return self.default.clock_s / self.deterministic.clock_s

    @property
    def cpu(self) -> float:
        return self.default.cpu_s / self.deterministic.cpu_s


def make_load(name: str) -> Mix:
    count, prompt, outputs = LOADS[name]
    return [(random_ids(100 + index, prompt, VOCAB), outputs) for index in range(count)]


def measure_modes(folder: Path, cpu_ops: str, repeats: int) -> list[ModeRatio]:
    """Measure both modes under every load; the first round warms up. Raises ConfigError if `cpu_ops` is not
    available."""
    modes = [LoadedModel.load(folder, cpu_ops=cpu_ops, deterministic=mode, dtype="bfloat16") for mode in (False, True)]
    ratios = []
    for name in LOADS:
        load = make_load(name)
        runs: list[list[MixRun]] = [[], []]
        for _ in range(repeats + 1):
            for mode, loaded in enumerate(modes):
                runs[mode].append(run_mix(loaded, load))
        best = [Timing.best([run.timing for run in of_mode[1:]]) for of_mode in runs]
        ratios.append(ModeRatio(cpu_ops, name, best[0], best[1]))
    return ratios
