"""The loads of the engine benchmark on a small real model: half an arena, and a long prefill beside decodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.rig import LoadedModel, Rig, RigOptions, random_ids
from forkpoint.sched.plan import IntArray

Mix = Sequence[tuple[IntArray, int]]  # prompts with their output lengths


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of wall-clock time and of this process's CPU time."""

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
    """One run of a mix: its duration, the tokens that entered the model, and every output."""

    timing: Timing
    num_tokens: int
    num_steps: int
    num_preemptions: int
    outputs: tuple[tuple[int, ...], ...]


def draw_mix(kind: str, count: int, vocab_size: int, seed: int = 0) -> Mix:
    """Draw the requests of a mix.

    'long': long prompts with few outputs. 'many': short prompts, for which states take most of the memory. 'mixed':
    both, and long answers to short prompts.
    """
    ranges = {"long": ((1000, 3000), (8, 40)), "many": ((16, 120), (16, 90)), "answers": ((16, 200), (150, 400))}
    rng = np.random.default_rng(seed)
    mix = []
    for index in range(count):
        (low, high), (few, most) = ranges[kind if kind != "mixed" else sorted(ranges)[index % 3]]
        prompt = random_ids(int(rng.integers(1 << 30)), int(rng.integers(low, high)), vocab_size)
        mix.append((prompt, int(rng.integers(few, most))))
    return mix


def half_pages(loaded: LoadedModel, mix: Mix) -> int:
    """Return half the pages that all requests need at their final lengths, but enough for the longest one and two
    slots, plus page 0."""
    layout = loaded.layout
    blocks = sum(layout.num_blocks_for(len(prompt) + outputs) for prompt, outputs in mix)
    half = (blocks * layout.block_bytes + len(mix) * layout.slot_bytes) // 2
    largest = max(layout.num_pages_for(len(prompt) + outputs, 3) for prompt, outputs in mix)
    return max(-(-half // layout.page_bytes), largest) + 1


def run_mix(loaded: LoadedModel, mix: Mix, num_pages: int = 0) -> MixRun:
    """Run all requests at once. Raises the error of a request that failed."""
    rig = Rig(loaded, RigOptions(num_pages=num_pages))
    requests = [rig.add(f"r{index}", prompt, outputs) for index, (prompt, outputs) in enumerate(mix)]
    watch = Stopwatch()
    rig.run()
    timing, stats = watch.read(), rig.sched.stats()
    outputs = tuple(tuple(request.output_token_ids) for request in requests)
    return MixRun(timing, rig.core.num_model_tokens, stats.num_steps, stats.num_preemptions, outputs)


@dataclass(frozen=True, slots=True)
class PrefillDelay:
    """99th percentiles of a step's duration, which is a running request's time between tokens.

    They are: before a long prompt arrives, while it is computed, and while it is computed without running requests.
    """

    quiet: Timing
    during: Timing
    budget_step: Timing
    num_steps: int
    smallest_share: float  # of the prefill's steps that gave every running request a token, at the worst

    @property
    def rise_cpu(self) -> float:
        """The increase by CPU time, in steps that use the whole token budget."""
        return (self.during.cpu_s - self.quiet.cpu_s) / self.budget_step.cpu_s


def measure_long_prefill(loaded: LoadedModel, num_tokens: int, num_running: int, budget: int) -> PrefillDelay:
    """Measure steps while `num_running` requests decode and a prompt of `num_tokens` is computed. Steps of the same
    prompt without running requests alternate with them."""
    vocab = loaded.model.config.vocab_size
    options = RigOptions(budget=budget, ample_tokens=2 * num_tokens)
    prompt, quiet_steps = random_ids(1, num_tokens, vocab), 100
    alone, rig = Rig(loaded, options), Rig(loaded, options)
    outputs = quiet_steps + 2 * (num_tokens // (budget // 2) + 2)
    running = [rig.add(f"r{index}", random_ids(10 + index, 40, vocab), outputs) for index in range(num_running)]
    rig.step()
    quiet = [_time_step(rig) for _ in range(quiet_steps)]
    requests = [each.add("long", prompt, 1) for each in (alone, rig)]
    before = [len(request.output_token_ids) for request in running]
    during: list[Timing] = []
    budget_steps: list[Timing] = []
    while not all(request.output_token_ids for request in requests):
        for each, request, times in zip((alone, rig), requests, (budget_steps, during), strict=True):
            if not request.output_token_ids:
                times.append(_time_step(each))
    gained = [len(request.output_token_ids) - count for request, count in zip(running, before, strict=True)]
    share = min(gained) / len(during)
    return PrefillDelay(_p99(quiet), _p99(during), _p99(budget_steps), len(during), share)


def _time_step(rig: Rig) -> Timing:
    watch = Stopwatch()
    rig.step()
    return watch.read()


def _p99(times: Sequence[Timing]) -> Timing:
    return Timing(
        float(np.percentile([t.clock_s for t in times], 99)), float(np.percentile([t.cpu_s for t in times], 99))
    )
