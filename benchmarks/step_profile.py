"""Measures where a step's time goes: on the host by phase of the loop, on the device by kernel."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from forkpoint.engine.llm import LLM
from forkpoint.sched.scheduler import Scheduler

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
    """A planner whose `schedule` and `apply` are timed. It passes everything else on."""

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
    """A runner whose `submit` is timed, and the wait for its result."""

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
    """Time the phases of the engine's loop in this context."""
    core, clock = llm._engine.core, HostClock()
    planner, runner = core.scheduler, core._runner
    core.scheduler, core._runner = cast(Scheduler, TimedPlanner(planner, clock)), TimedRunner(runner, clock)
    try:
        yield clock
    finally:
        core.scheduler, core._runner = planner, runner


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel or copy on the device, in microseconds of its clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Total:
    """All launches of one kernel, or all pauses after it: their number and seconds per step."""

    name: str
    count: float
    seconds: float

    def line(self, whole_s: float) -> str:
        share = self.seconds / whole_s if whole_s else 0.0
        return f"  {self.seconds * 1e6:9.1f} us {share:6.1%} {self.count:7.1f} x  {self.name[:90]}"


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Seconds per step: those in which something runs, and those from the first start to the last end."""

    busy_s: float
    span_s: float
    kernels: tuple[Total, ...]
    pauses: tuple[Total, ...]  # by the kernel before them


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of step. `wall_s` and `phases_s` are seconds per step without the profiler."""

    name: str
    wall_s: float
    phases_s: dict[str, float]
    device: DeviceTime

    def lines(self, num_kernels: int) -> list[str]:
        device, rest = self.device, self.wall_s - sum(self.phases_s.values())
        phases = ", ".join(f"{phase} {_ms(spent)}" for phase, spent in {**self.phases_s, "rest": rest}.items())
        paused = device.span_s - device.busy_s
        out = [f"{self.name}: {_ms(self.wall_s)} ms a step; host: {phases}"]
        if device.kernels:
            launches = sum(kernel.count for kernel in device.kernels)
            out.append(
                f"  device: busy {_ms(device.busy_s)} of {_ms(device.span_s)} ms in {launches:.0f} launches of "
                f"{len(device.kernels)} kernels"
            )
            out += [kernel.line(device.busy_s) for kernel in device.kernels[:num_kernels]]
            out.append(f"  pauses: {_ms(paused)} ms, by the kernel before them")
            out += [pause.line(paused) for pause in device.pauses[: max(1, num_kernels // 3)]]
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
    medians = {phase: statistics.median(spent[phase] for spent in phases) for phase in PHASES}
    return Profile(name, statistics.median(walls), medians, account(record_launches(step, count), count))


def profile_call(llm: LLM, name: str, call: Callable[[], object], num_kernels: int = 20) -> list[str]:
    """Return lines that say where the time of one call goes."""
    return profile_steps(llm, name, call, 1).lines(num_kernels)


def record_launches(step: Callable[[], object], count: int) -> list[Launch]:
    """Return the launches of `count` calls of `step` on a CUDA device; none without such a device."""
    if not torch.cuda.is_available():
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    return [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type.name == "CUDA"
    ]


def account(launches: Sequence[Launch], count: int) -> DeviceTime:
    """Sum up the launches of `count` steps. If launches overlap, a pause begins when the last of them ends."""
    if not launches:
        return DeviceTime(0.0, 0.0, (), ())
    ordered = sorted(launches, key=lambda launch: launch.start_us)
    kernels: dict[str, list[float]] = defaultdict(list)
    pauses: dict[str, list[float]] = defaultdict(list)
    last = ordered[0]
    for launch in ordered:
        kernels[launch.name].append(launch.end_us - launch.start_us)
        if launch.start_us > last.end_us:
            pauses[last.name].append(launch.start_us - last.end_us)
        if launch.end_us >= last.end_us:
            last = launch
    span_us = last.end_us - ordered[0].start_us
    paused_us = sum(sum(lengths) for lengths in pauses.values())
    per_step_s = 1e-6 / count
    return DeviceTime(
        (span_us - paused_us) * per_step_s, span_us * per_step_s, _totals(kernels, count), _totals(pauses, count)
    )


def _totals(lengths_us: Mapping[str, Sequence[float]], count: int) -> tuple[Total, ...]:
    found = [Total(name, len(own) / count, sum(own) / 1e6 / count) for name, own in lengths_us.items()]
    return tuple(sorted(found, key=lambda total: -total.seconds))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
