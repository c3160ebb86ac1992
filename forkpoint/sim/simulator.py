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
        self._steps: list[tuple[float, int]] = []  # (end, number of the replica), at most one for each replica
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
                now, number = heapq.heappop(self._steps)
                self._finish_step(now, number)
            if not self._arrivals or self._arrivals[0][0] > now:  # requests that arrive at the same moment share steps
                self._start_steps(now)
        counters = tuple(replica.counters() for replica in self._replicas)
        return SimulationResult(tuple(self._records.values()), counters, now, self._busy_s, self._num_steps)

    def _arrive_at(self, when: float, request: TraceRequest) -> None:
        heapq.heappush(self._arrivals, (when, next(self._order), request))

    def _admit(self, now: float, request: TraceRequest) -> None:
        num_unfinished = [replica.num_unfinished() for replica in self._replicas]
        number = self._router.choose(num_unfinished, lambda number: self._replicas[number].restorable(request))
        self._records[request.id] = RequestRecord(request, now, number)
        if not self._replicas[number].add(request):
            self._start_followers(now, request)

    def _start_steps(self, now: float) -> None:
        """Start a step of every replica that is idle and has requests."""
        stepping = {number for _, number in self._steps}
        for number, replica in enumerate(self._replicas):
            if number in stepping or not replica.num_unfinished():
                continue
            load = replica.plan(now)
            if load is not None:
                seconds = self._cost.step_s(load)
                self._busy_s += seconds
                self._num_steps += 1
                heapq.heappush(self._steps, (now + seconds, number))

    def _finish_step(self, now: float, number: int) -> None:
        news = self._replicas[number].finish(now)
        for name in news.first_tokens:
            record = self._records[name]
            if record.first_token_s is None:
                record.first_token_s = now
        for name, report in news.finished.items():
            record = self._records[name]
            record.finished_s, record.cache = now, report
            self._start_followers(now, record.request)
        if news.finished:
            self._on_finish(len(news.finished))

    def _start_followers(self, now: float, request: TraceRequest) -> None:
        """Let the requests that follow an ended or refused one arrive after their think times."""
        for follower in self._followers.pop(request.id, ()):
            self._arrive_at(max(now + follower.think_s, follower.arrival_s), follower)
