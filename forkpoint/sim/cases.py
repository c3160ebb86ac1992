"""Cases to simulate, their results, and runs of many cases in parallel processes."""

from __future__ import annotations

import multiprocessing
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final, TypeAlias

import numpy as np

from forkpoint.config import SchedulerConfig
from forkpoint.errors import ConfigError, TraceError
from forkpoint.quick_imports import collection_paused
from forkpoint.routing.router import Router
from forkpoint.sim.cost import CostModel, Device
from forkpoint.sim.named_systems import make_system
from forkpoint.sim.replica import ReplicaCounters, SimulatedReplica
from forkpoint.sim.shape import ModelShape
from forkpoint.sim.simulator import SimulationResult, Simulator
from forkpoint.sim.trace import Trace

SUMMED: Final = tuple(each.name for each in fields(ReplicaCounters) if each.name != "lost_tokens")
Progress: TypeAlias = Callable[[int], None]
# Creates a replica from (system name, model, memory in bytes, scheduler options, all requests if it serves all).
SystemFactory: TypeAlias = Callable[[str, ModelShape, int, SchedulerConfig, Trace | None], SimulatedReplica]


@dataclass(frozen=True, slots=True)
class Case:
    """One system with one amount of memory and one trace. `memory_bytes` is per replica.

    `factory` creates the system of that name. Pass your own to simulate a system without a name.
    """

    trace: Trace
    shape: ModelShape
    device: Device
    system: str
    memory_bytes: int
    scheduler: SchedulerConfig
    num_replicas: int = 1
    router: str = "round-robin"
    factory: SystemFactory = make_system


@dataclass(slots=True, kw_only=True)
class CaseResult(ReplicaCounters):
    """The result of a case, over all replicas. Times are simulated seconds, rates are per simulated second."""

    trace: str
    model: str
    system: str
    memory_bytes: int
    num_requests: int
    num_refused: int
    prompt_tokens: int
    hit_tokens: int
    kv_hit_tokens: int  # what keys and values alone would have given
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    elapsed_s: float
    busy_s: float
    num_steps: int

    @property
    def hit_rate(self) -> float:
        """Reused tokens divided by all prompt tokens, including those of refused requests."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, object]:
        """Return all fields and the hit rate."""
        return {**asdict(self), "hit_rate": self.hit_rate}


def run_case(case: Case, progress: Progress | None = None) -> CaseResult:
    """Simulate one case. `progress` gets the numbers of requests that ended. TraceError if all were refused."""
    return _summary(case, _simulate(case, progress))


def _simulate(case: Case, progress: Progress | None) -> SimulationResult:
    foreseen = case.trace if case.num_replicas == 1 else None
    replicas = [
        case.factory(case.system, case.shape, case.memory_bytes, case.scheduler, foreseen)
        for _ in range(case.num_replicas)
    ]
    cost = CostModel(case.shape, case.device)
    simulator = Simulator(case.trace, replicas, cost, Router(case.router), progress)
    with collection_paused():  # collecting a tree of 100,000 nodes would take longer than everything else
        return simulator.run()


def _summary(case: Case, result: SimulationResult) -> CaseResult:
    served = [record for record in result.records if record.finished_s is not None]
    if not served:
        raise TraceError(
            f"{case.system} refused all {len(result.records)} requests of {case.trace.name}: "
            f"{case.memory_bytes} bytes hold none of them; give more memory"
        )
    waits = np.asarray([record.ttft_s for record in served])
    lost = Counter[str]()
    for counters in result.counters:
        lost.update(counters.lost_tokens)
    outputs = sum(record.request.output.num_tokens for record in served)
    prompts = sum(record.request.prompt.num_tokens for record in result.records)
    return CaseResult(
        trace=case.trace.name,
        model=case.shape.name,
        system=case.system,
        memory_bytes=case.memory_bytes,
        num_requests=len(result.records),
        num_refused=len(result.records) - len(served),
        prompt_tokens=prompts,
        hit_tokens=sum(record.cache.num_cached_tokens for record in served),
        kv_hit_tokens=sum(record.cache.kv_num_tokens for record in served),
        ttft_mean_s=float(waits.mean()),
        ttft_p50_s=float(np.percentile(waits, 50)),
        ttft_p95_s=float(np.percentile(waits, 95)),
        prompt_tokens_per_s=prompts / result.elapsed_s,
        output_tokens_per_s=outputs / result.elapsed_s,
        elapsed_s=result.elapsed_s,
        busy_s=result.busy_s,
        num_steps=result.num_steps,
        lost_tokens=dict(lost),
        **{name: sum(getattr(counters, name) for counters in result.counters) for name in SUMMED},
    )


def run_cases(cases: Sequence[Case], jobs: int, progress: Progress | None = None) -> list[CaseResult]:
    """Simulate many cases, `jobs` processes at a time; return results in the order of the cases.

    `progress` gets the numbers of requests that ended. An exception of a case is raised here; ConfigError if `jobs`
    is below 1.
    """
    if jobs < 1:
        raise ConfigError(f"jobs={jobs} is not allowed; give 1 or more")
    report = progress or (lambda count: None)
    if jobs == 1 or len(cases) == 1:
        return [run_case(case, report) for case in cases]
    context = multiprocessing.get_context("fork")  # with fork, cases need not be picklable
    waiting = deque(enumerate(cases))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    results: dict[int, CaseResult] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, case = waiting.popleft()
                here, there = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_work, args=(case, there), daemon=True)
                process.start()
                there.close()
                running[here] = index, process
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                index, process = running[connection]
                message = _receive(connection, process)
                if isinstance(message, CaseResult):
                    del running[connection]
                    process.join()
                    results[index] = message
                else:
                    report(message)
    finally:
        for _, process in running.values():
            process.terminate()
    return [results[index] for index in range(len(cases))]


def _receive(connection: Connection, process: BaseProcess) -> CaseResult | int:
    """Return the result of a case, or a number of its requests that ended. Raises the exception of a case."""
    try:
        message = connection.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process of a case died with exit code {process.exitcode}") from None
    if isinstance(message, BaseException):
        raise message
    assert isinstance(message, (CaseResult, int))
    return message


def _work(case: Case, parent: Connection) -> None:
    try:
        parent.send(run_case(case, parent.send))
    except Exception as error:
        error.add_note(f"in the process of the case:\n{traceback.format_exc()}")  # a pickle has no traceback
        parent.send(error)
