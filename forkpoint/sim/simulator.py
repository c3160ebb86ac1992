"""The event loop of the simulator: requests arrive, replicas run steps, and simulated time advances."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forkpoint.outputs import CacheReport
from forkpoint.routing.router import Router
from forkpoint.sim.cost import CostModel
from forkpoint.sim.replica import ReplicaCounters, SimulatedReplica
from forkpoint.sim.trace import Trace, TraceRequest


@dataclass(slots=True)
class RequestRecord:
    """The record of one request on replica number `replica`. Times are simulated seconds.

    A refused request never ends.
    """

    request: TraceRequest
    arrival_s: float
    replica: int
    first_token_s: float | None = None
    finished_s: float | None = None
    cache: CacheReport = field(default_factory=CacheReport)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from its arrival; None before it, or if there is none."""
        if self.first_token_s is None:
            return None
        return self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Records in the order of arrival, the replicas' counters, and the simulated duration in seconds.

    `busy_s` sums the steps of all replicas.
    """

    records: tuple[RequestRecord, ...]
    counters: tuple[ReplicaCounters, ...]
    elapsed_s: float
    busy_s: float
    num_steps: int


class Simulator:
    """Runs a trace on replicas of one system. A replica runs one step at a time, which takes as long as `cost` says.

    `on_finish` gets the number of requests that ended in a step.
    """

    def __init__(
        self,
        trace: Trace,
        replicas: Sequence[SimulatedReplica],
        cost: CostModel,
        router: Router,
        on_finish: Callable[[int], None] | None = None,
    ) -> None:
        self._replicas = replicas
        self._cost = cost
        self._router = router
        self._on_finish = on_finish or (lambda count: None)
        self._order = itertools.count()
        self._arrivals: list[tuple[float, int, TraceRequest]] = []
        self._steps: list[tuple[float, int]] = []  # (end, replica) of running steps, one per replica
        self._records: dict[str, RequestRecord] = {}
        self._followers: dict[str, list[TraceRequest]] = {}
        self._busy_s, self._num_steps = 0.0, 0
        for request in trace.requests:
            if request.after is None:
                self._arrive_at(request.arrival_s, request)
            else:
                self._followers.setdefault(request.after, []).append(request)

    def run(self) -> SimulationResult:
        """Run the whole trace, once, and return what happened."""
        now = 0.0
        while self._arrivals or self._steps:
            if self._arrivals and (not self._steps or self._arrivals[0][0] <= self._steps[0][0]):
                now, _, request = heapq.heappop(self._arrivals)
                self._admit(now, request)
            else:
                now, replica = heapq.heappop(self._steps)
                self._finish_step(now, replica)
            if not self._arrivals or self._arrivals[0][0] > now:  # requests that arrive at the same moment share steps
                self._wake_all(now)
        counters = tuple(replica.counters() for replica in self._replicas)
        return SimulationResult(tuple(self._records.values()), counters, now, self._busy_s, self._num_steps)

    def _arrive_at(self, when: float, request: TraceRequest) -> None:
        heapq.heappush(self._arrivals, (when, next(self._order), request))

    def _admit(self, now: float, request: TraceRequest) -> None:
        loads = [system.num_unfinished() for system in self._replicas]
        replica = self._router.choose(loads, lambda index: self._replicas[index].restorable(request))
        self._records[request.id] = RequestRecord(request, now, replica)
        if not self._replicas[replica].add(request):
            self._follow_up(now, request)

    def _wake_all(self, now: float) -> None:
        stepping = {replica for _, replica in self._steps}
        for replica, system in enumerate(self._replicas):
            if replica in stepping or not system.num_unfinished():
                continue
            load = system.plan(now)
            if load is not None:
                seconds = self._cost.step_s(load)
                self._busy_s += seconds
                self._num_steps += 1
                heapq.heappush(self._steps, (now + seconds, replica))

    def _finish_step(self, now: float, replica: int) -> None:
        news = self._replicas[replica].finish(now)
        for name in news.first_tokens:
            record = self._records[name]
            if record.first_token_s is None:
                record.first_token_s = now
        for name, report in news.finished.items():
            record = self._records[name]
            record.finished_s, record.cache = now, report
            self._follow_up(now, record.request)
        if news.finished:
            self._on_finish(len(news.finished))

    def _follow_up(self, now: float, request: TraceRequest) -> None:
        for follower in self._followers.pop(request.id, ()):
            self._arrive_at(max(now + follower.think_s, follower.arrival_s), follower)
