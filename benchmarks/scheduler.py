"""Measures the scheduler's time on the host: milliseconds per step with many running requests, and of one long lookup.

No model runs. The results are random tokens for the rows that each plan samples.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import machine
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import CacheConfig, SchedulerConfig
from forkpoint.engine.core import collect_garbage
from forkpoint.params import SamplingParams
from forkpoint.sched.plan import IntArray, StepPlan, StepResult
from forkpoint.sched.request import Request
from forkpoint.sched.scheduler import Scheduler
from forkpoint.sim.shape import find_shape

VOCAB_SIZE = 248_320
SHARED_TOKENS = 512  # of every prompt in the steady load
OWN_TOKENS = 256
OUTPUT_TOKENS = (64, 512)  # drawn evenly, so that requests end and cross block boundaries in different steps


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of schedule + apply in each step (wall-clock and CPU), and the tokens of these steps."""

    clock_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]
    num_admitted: int
    num_boundaries: int
    num_evictions: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Milliseconds of wall-clock time and of this thread's CPU time, which excludes other processes."""

    clock_ms: float
    cpu_ms: float

    @classmethod
    def now(cls) -> Reading:
        return cls(time.perf_counter() * 1e3, time.thread_time() * 1e3)

    def __add__(self, other: Reading) -> Reading:
        return Reading(self.clock_ms + other.clock_ms, self.cpu_ms + other.cpu_ms)

    def __sub__(self, other: Reading) -> Reading:
        return Reading(self.clock_ms - other.clock_ms, self.cpu_ms - other.cpu_ms)


def percentiles(values: Sequence[float], percents: Sequence[float]) -> str:
    return " / ".join(f"{np.percentile(values, percent):.2f}" for percent in percents)


def benchmark_layout() -> CacheLayout:
    """Return the layout of Qwen3.5-9B: 8 attention layers, 24 recurrent ones with fp32 states."""
    return find_shape("qwen3.5-9b").layout


class SteadyLoad:
    """Keeps `num_running` requests running: a request that ends is replaced before the next step."""

    def __init__(self, num_running: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._ids = np.random.default_rng(seed)
        self._shared = self._draw(SHARED_TOKENS)
        layout = benchmark_layout()
        per_request = layout.num_pages_for(SHARED_TOKENS + OWN_TOKENS + OUTPUT_TOKENS[1], 3)
        config = SchedulerConfig(max_num_seqs=num_running)
        pages = num_running * per_request
        self.sched = Scheduler(layout, pages, CacheConfig(), config)
        self._num_added = 0
        for _ in range(num_running):
            self.add()

    def _draw(self, count: int) -> IntArray:
        return self._ids.integers(0, VOCAB_SIZE, count, dtype=np.int32)

    def add(self) -> None:
        prompt = np.concatenate([self._shared, self._draw(OWN_TOKENS)])
        length = self._rng.randint(*OUTPUT_TOKENS)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        self.sched.add(Request(f"r{self._num_added}", prompt, params, length, seed=self._num_added))
        self._num_added += 1

    def result(self, plan: StepPlan) -> StepResult:
        """Return the result that a runner would give, with random tokens."""
        return StepResult(plan.step, self._draw(len(plan.sampled_rows)), num_tokens=plan.num_tokens)

    def step(self) -> tuple[Reading, StepPlan]:
        """Return the time spent in the scheduler, and the plan."""
        start = Reading.now()
        plan = self.sched.schedule()
        planned = Reading.now()
        assert plan is not None
        result = self.result(plan)
        collect_garbage(plan.step)  # as EngineCore does while the step runs
        applying = Reading.now()
        updates = self.sched.apply(result)
        spent = (planned - start) + (Reading.now() - applying)
        for update in updates:
            if update.finish_reason is not None:
                self.add()
        return spent, plan


def evictions(sched: Scheduler) -> int:
    """Return the number of blocks and checkpoints evicted so far."""
    stats = sched.cache.store.stats()
    return stats.blocks_evicted + sum(stats.checkpoints_evicted.values())


def measure_steps(num_running: int, num_steps: int) -> StepTimes:
    """Run until all first requests have been replaced, then time `num_steps` steps."""
    load = SteadyLoad(num_running)
    for _ in range(2 * OUTPUT_TOKENS[1]):
        load.step()
    times: list[Reading] = []
    admitted = boundaries = 0
    before = evictions(load.sched)
    for _ in range(num_steps):
        elapsed, plan = load.step()
        times.append(elapsed)
        admitted += len(plan.added)
        boundaries += int(np.count_nonzero(plan.rows.start[: plan.num_decodes] % 64 == 0))
    clock, cpu = tuple(t.clock_ms for t in times), tuple(t.cpu_ms for t in times)
    return StepTimes(clock, cpu, admitted, boundaries, evictions(load.sched) - before)


def measure_lookup(num_tokens: int, repeats: int) -> list[Reading]:
    """Time to hash and look up a prompt of `num_tokens` tokens that is cached up to its last boundary."""
    layout = benchmark_layout()
    pages = 2 * layout.num_pages_for(num_tokens + 1, 8)
    sched = Scheduler(layout, pages, CacheConfig(), SchedulerConfig())
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)
    sched.add(Request("first", prompt, SamplingParams(max_tokens=1), 1, seed=0))
    while (plan := sched.schedule()) is not None:
        sched.apply(StepResult(plan.step, np.zeros(len(plan.sampled_rows), np.int32)))
    times = []
    for index in range(repeats):
        start = Reading.now()
        lease = sched.cache.new_lease(f"again{index}", "", prompt)
        hit = sched.cache.lookup(lease, num_tokens)
        times.append(Reading.now() - start)
        assert hit.num_tokens == layout.usable_prefix(num_tokens), f"the lookup found {hit.num_tokens} tokens only"
    return times


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256, help="requests that run at once")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lookup-tokens", type=int, default=100_000)
    args = parser.parse_args(argv)
    print(f"{machine.cpu_model()}, load average {machine.load_average():.1f}, commit {machine.commit_hash()}")
    steps = measure_steps(args.running, args.steps)
    lookup = measure_lookup(args.lookup_tokens, repeats=21)
    print(
        f"schedule + apply, {args.running} running, {args.steps} steps with {steps.num_admitted} admissions, "
        f"{steps.num_boundaries} decode boundaries and {steps.num_evictions} evictions, median / p99: "
        f"{percentiles(steps.clock_ms, (50, 99))} ms by the clock, {percentiles(steps.cpu_ms, (50, 99))} ms of CPU "
        "(reach: 1.5 / 3)"
    )
    clock, cpu = [t.clock_ms for t in lookup], [t.cpu_ms for t in lookup]
    print(
        f"lookup of {args.lookup_tokens} tokens, hashing included, best / median: {percentiles(clock, (0, 50))} ms by "
        f"the clock, {percentiles(cpu, (0, 50))} ms of CPU (reach: 5)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
