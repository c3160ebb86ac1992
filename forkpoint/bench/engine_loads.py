"""The loads of the engine benchmark on a small real model: half an arena, and a long prefill beside decodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.bench.rig import LoadedModel, Rig, RigOptions, random_ids
from forkpoint.sched.plan import IntArray

Mix = Sequence[tuple[IntArray, int]]  # prompts with their output lengths


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds by the clock and of this process' CPU."""

    clock_s: float
    cpu_s: float

    @classmethod
    def best(cls, timings: Sequence[Timing]) -> Timing:
        return cls(min(t.clock_s for t in timings), min(t.cpu_s for t in timings))


class Stopwatch:
    def __init__(self) -> None:
        self._clock, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Timing:
        return Timing(time.perf_counter() - self._clock, time.process_time() - self._cpu)


@dataclass(frozen=True, slots=True)
class MixRun:
    """One run of a mix: how long it took, what entered the model, and every output."""

    timing: Timing
    num_tokens: int
    num_steps: int
    num_preemptions: int
    outputs: tuple[tuple[int, ...], ...]


def draw_mix(kind: str, count: int, vocab_size: int, seed: int = 0) -> Mix:
    """'long': long prompts with few outputs; 'many': short prompts, so that states weigh; 'mixed': both, and
    long answers to short prompts."""
    ranges = {"long": ((1000, 3000), (8, 40)), "many": ((16, 120), (16, 90)), "answers": ((16, 200), (150, 400))}
    rng = np.random.default_rng(seed)
    mix = []
    for index in range(count):
        (low, high), (few, most) = ranges[kind if kind != "mixed" else sorted(ranges)[index % 3]]
        prompt = random_ids(int(rng.integers(1 << 30)), int(rng.integers(low, high)), vocab_size)
        mix.append((prompt, int(rng.integers(few, most))))
    return mix


def half_pages(loaded: LoadedModel, mix: Mix) -> int:
    """Half the bytes of all requests at their final length, at least one of them and two slots more; and page 0."""
    layout = loaded.layout
    blocks = sum(layout.num_blocks_for(len(prompt) + outputs) for prompt, outputs in mix)
    half = (blocks * layout.block_bytes + len(mix) * layout.slot_bytes) // 2
    largest = max(layout.num_pages_for(len(prompt) + outputs, 3) for prompt, outputs in mix)
    return max(-(-half // layout.page_bytes), largest) + 1


def run_mix(loaded: LoadedModel, mix: Mix, num_pages: int = 0) -> MixRun:
    """All requests at once, to the end. Raises the error of a request that failed."""
    rig = Rig(loaded, RigOptions(num_pages=num_pages))
    requests = [rig.add(f"r{index}", prompt, outputs) for index, (prompt, outputs) in enumerate(mix)]
    watch = Stopwatch()
    rig.run()
    timing, stats = watch.read(), rig.sched.stats()
    outputs = tuple(tuple(request.output_token_ids) for request in requests)
    return MixRun(timing, rig.core.num_model_tokens, stats.num_steps, stats.num_preemptions, outputs)


@dataclass(frozen=True, slots=True)
class PrefillDelay:
    """Milliseconds between a running request's tokens at the 99th percentile: before and while a long prompt is
    computed; and of a step that computes a prompt chunk of the whole budget and nothing else."""

    quiet_ms: float
    during_ms: float
    budget_step_ms: float
    num_steps: int
    smallest_share: float  # of the decode rows that a step of the prefill carried, at the worst

    @property
    def rise_in_steps(self) -> float:
        return (self.during_ms - self.quiet_ms) / self.budget_step_ms


def measure_long_prefill(loaded: LoadedModel, num_tokens: int, num_running: int, budget: int) -> PrefillDelay:
    """`num_running` requests decode while a prompt of `num_tokens` is computed. The budget-sized step is the slowest
    one of the same prompt alone, since attention makes later chunks dearer."""
    vocab = loaded.model.config.vocab_size
    options = RigOptions(budget=budget, ample_tokens=2 * num_tokens, max_model_len=num_tokens + 64)
    prompt = random_ids(1, num_tokens, vocab)
    alone = Rig(loaded, options)
    alone.add("long", prompt, 1)
    budget_steps = _steps_ms(alone, "long")
    rig = Rig(loaded, options)
    quiet_steps = 60
    running = [
        rig.add(f"r{index}", random_ids(10 + index, 40, vocab), quiet_steps + 2 * len(budget_steps) + 40)
        for index in range(num_running)
    ]
    rig.step()
    quiet = []
    for _ in range(quiet_steps):
        watch = Stopwatch()
        rig.step()
        quiet.append(watch.read().clock_s * 1e3)
    rig.add("long", prompt, 1)
    counts = [len(request.output_token_ids) for request in running]
    during = _steps_ms(rig, "long")
    gained = [len(r.output_token_ids) - before for r, before in zip(running, counts, strict=True)]
    return PrefillDelay(
        float(np.percentile(quiet, 99)),
        float(np.percentile(during, 99)),
        float(np.percentile(budget_steps, 99)),
        len(during),
        min(gained) / len(during),
    )


def _steps_ms(rig: Rig, name: str) -> list[float]:
    """Durations of the steps until the request has its first token."""
    times = []
    while not rig.requests[name].output_token_ids:
        watch = Stopwatch()
        rig.step()
        times.append(watch.read().clock_s * 1e3)
    return times
