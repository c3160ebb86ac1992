"""Where a step's time goes: on the host by phase of the loop, on the device by kernel."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from forkpoint.engine.llm import LLM

PHASES = ("schedule", "submit", "wait", "apply")


@dataclass(slots=True)
class HostClock:
    """Seconds spent in each phase since the last `drain`."""

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.spent[phase] += time.perf_counter() - start

        return timed_call

    def drain(self) -> dict[str, float]:
        spent, self.spent = self.spent, dict.fromkeys(PHASES, 0.0)
        return spent


class TimedPlanner:
    """A planner whose `schedule` and `apply` are timed; all else is the planner's own."""

    def __init__(self, inner: Any, clock: HostClock) -> None:
        self._inner = inner
        self.schedule = clock.timed("schedule", inner.schedule)
        self.apply = clock.timed("apply", inner.apply)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(slots=True)
class TimedStep:
    result: Callable[[], Any]


class TimedRunner:
    """A runner whose `submit`, and the wait for what it returns, are timed."""

    def __init__(self, inner: Any, clock: HostClock) -> None:
        self._inner = inner
        self._clock = clock
        self._submit = clock.timed("submit", inner.submit)

    def submit(self, plan: Any) -> TimedStep:
        return TimedStep(self._clock.timed("wait", self._submit(plan).result))

    def close(self) -> None:
        self._inner.close()


@contextmanager
def timed_phases(llm: LLM) -> Iterator[HostClock]:
    """While open, the phases of the engine's loop are timed."""
    core, clock = llm._engine.core, HostClock()
    planner, runner = core._scheduler, core._runner
    core._scheduler, core._runner = TimedPlanner(planner, clock), TimedRunner(runner, clock)
    try:
        yield clock
    finally:
        core._scheduler, core._runner = planner, runner


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel: their number and seconds of device time, per step."""

    name: str
    num_launches: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of step. Seconds are per step; `wall_s` without the profiler, `busy_s` and `span_s` on the device."""

    name: str
    wall_s: float
    phases_s: dict[str, float]
    busy_s: float
    span_s: float
    kernels: tuple[Kernel, ...]

    def lines(self, num_kernels: int) -> list[str]:
        rest = self.wall_s - sum(self.phases_s.values())
        phases = ", ".join(f"{phase} {_ms(spent)}" for phase, spent in {**self.phases_s, "rest": rest}.items())
        out = [
            f"{self.name}: {_ms(self.wall_s)} ms a step; host: {phases}; device: busy {_ms(self.busy_s)} of "
            f"{_ms(self.span_s)} (gaps {_ms(self.span_s - self.busy_s)}), {len(self.kernels)} kernels"
        ]
        for kernel in self.kernels[:num_kernels]:
            share = kernel.seconds / self.busy_s if self.busy_s else 0.0
            out.append(
                f"  {kernel.seconds * 1e6:9.1f} us {share:6.1%} {kernel.num_launches:7.1f} x  {kernel.name[:90]}"
            )
        return out


def profile_steps(llm: LLM, name: str, step: Callable[[], object], count: int) -> Profile:
    """Time `count` calls of `step` on the host, then as many on the device."""
    with timed_phases(llm) as clock:
        walls, phases = [], []
        for _ in range(count):
            clock.drain()
            start = time.perf_counter()
            step()
            walls.append(time.perf_counter() - start)
            phases.append(clock.drain())
    kernels, busy, span = profile_kernels(step, count)
    medians = {phase: statistics.median(spent[phase] for spent in phases) for phase in PHASES}
    return Profile(name, statistics.median(walls), medians, busy, span, kernels)


def profile_call(llm: LLM, name: str, call: Callable[[], object], num_kernels: int = 20) -> list[str]:
    """Lines that say where the time of one call goes."""
    return profile_steps(llm, name, call, 1).lines(num_kernels)


def profile_kernels(step: Callable[[], object], count: int) -> tuple[tuple[Kernel, ...], float, float]:
    """(kernels by time, seconds with a kernel running, seconds from the first to the last), per call of `step`."""
    if not torch.cuda.is_available():
        return (), 0.0, 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.events() or []:
        if event.device_type.name == "CUDA":
            spans.append((event.time_range.start, event.time_range.end))
            totals[event.name][0] += 1
            totals[event.name][1] += event.time_range.end - event.time_range.start
    kernels = [Kernel(name, n / count, us / 1e6 / count) for name, (n, us) in totals.items()]
    kernels.sort(key=lambda kernel: -kernel.seconds)
    busy, span = covered(spans)
    return tuple(kernels), busy / 1e6 / count, span / 1e6 / count


def covered(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """(length of the union of half-open intervals, from the first start to the last end)."""
    if not spans:
        return 0.0, 0.0
    spans = sorted(spans)
    total, reached = 0.0, spans[0][0]
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total, reached - spans[0][0]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
