"""Decides what to keep if all requests are known beforehand, under everything else that limits the engine.

Scheduler, arena, pages and tree are the engine's own. But a state is stored only where a later request will resume. The
evicted entry is the one that saves the fewest tokens for its bytes and the time until that request comes. This is
Belady's rule for entries of unequal size and worth. Its hit rate can be reached, but it is not proven to be the
highest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from forkpoint.cache.capture import CaptureContext, CapturePolicy
from forkpoint.cache.eviction import EntryFacts, EvictionPolicy
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.tree import Origin
from forkpoint.errors import ConfigError
from forkpoint.sim.cost import StepLoad
from forkpoint.sim.engine_replica import EngineOptions, EngineReplica
from forkpoint.sim.replica import StepNews
from forkpoint.sim.trace import Trace, TraceRequest
from studies.bound import BLOCK, by_arrival, hashes_of

SHORTEST_WAIT_S: Final = 0.1  # of entries that are wanted at once, bytes and tokens decide
FIRST_SERVICE_S: Final = 1.0
SERVICE_STEP: Final = 0.05  # one request moves the mean service time by this share


class Foresight:
    """Knows where and when the requests of a trace will resume.

    A request's target is the end of its longest prefix that earlier requests pass and where the engine can keep a
    state. That is in a prompt, or at the last boundary of an output. Its arrival is exact if the trace says it. After
    requests that have not ended, each of them is assumed to take the mean time.

    The caller keeps `now_s` and reports what happens to each request.
    """

    def __init__(self, trace: Trace) -> None:
        self.now_s = 0.0
        self._requests = {request.id: request for request in trace.requests}
        self._users: dict[BlockHash, deque[TraceRequest]] = {}  # by target, in the order of arrival
        self._breakpoints: dict[str, tuple[int, ...]] = {}
        self._arrived: set[str] = set()
        self._started_s: dict[str, float] = {}
        self._finished_s: dict[str, float] = {}
        self._service_s = FIRST_SERVICE_S
        self._find_targets(by_arrival(trace))

    def _find_targets(self, order: list[TraceRequest]) -> None:
        passed: set[BlockHash] = set()
        resumable: set[BlockHash] = set()
        last_use: dict[BlockHash, int] = {}
        chains = []
        for index, request in enumerate(order):
            hashes = hashes_of(request)
            usable = (request.prompt.num_tokens - 1) // BLOCK
            reusable = next((i for i in range(usable) if hashes[i] not in passed), usable)
            target = next((hashes[i] for i in reversed(range(reusable)) if hashes[i] in resumable), None)
            if target is not None:
                self._users.setdefault(target, deque()).append(request)
                last_use[target] = index
            passed.update(hashes)
            resumable.update(hashes[: request.prompt.num_tokens // BLOCK], hashes[-1:])
            chains.append(hashes)
        for index, (request, hashes) in enumerate(zip(order, chains, strict=True)):
            targets = (i for i, block_hash in enumerate(hashes) if last_use.get(block_hash, -1) > index)
            self._breakpoints[request.id] = tuple(BLOCK * (i + 1) for i in targets)

    def breakpoints(self, request_id: str) -> tuple[int, ...]:
        """Return the positions in a request's tokens from which later requests will resume."""
        found = self._breakpoints.get(request_id)
        if found is None:
            raise ConfigError(f"request {request_id!r} is not of the trace that is foreseen; give that trace")
        return found

    def wait_s(self, block_hash: BlockHash) -> float:
        """Return the seconds until a request will resume from the end of that block; infinity if none will."""
        users = self._users.get(block_hash)
        while users and users[0].id in self._started_s:
            users.popleft()
        return max(self._arrival_s(users[0]) - self.now_s, 0.0) if users else math.inf

    def _arrival_s(self, request: TraceRequest) -> float:
        behind = []
        while (leader := self._awaited(request)) is not None:
            behind.append(request)
            request = leader
        when = self._known_arrival_s(request)
        for follower in reversed(behind):
            when = max(max(when + self._service_s, self.now_s) + follower.think_s, follower.arrival_s)
        return when

    def _awaited(self, request: TraceRequest) -> TraceRequest | None:
        """Return the unfinished request whose end this one waits for."""
        if request.id in self._arrived or request.after is None or request.after in self._finished_s:
            return None
        return self._requests[request.after]

    def _known_arrival_s(self, request: TraceRequest) -> float:
        if request.id in self._arrived:
            return self._started_s.get(request.id, self.now_s)
        if request.after is None:
            return request.arrival_s
        return max(self._finished_s[request.after] + request.think_s, request.arrival_s)

    # --- what happens

    def arrive(self, request_id: str) -> None:
        """Note that a request is queued."""
        self._arrived.add(request_id)

    def start(self, request_id: str) -> None:
        """Note that a request leaves the queue, after it has looked up where it can resume."""
        self._started_s.setdefault(request_id, self.now_s)

    def finish(self, request_id: str) -> None:
        """Note that a request has ended."""
        took = self.now_s - self._started_s[request_id]
        self._service_s += SERVICE_STEP * (took - self._service_s)
        self._finished_s[request_id] = self.now_s

    def refuse(self, request_id: str) -> None:
        """Note that a request is refused."""
        self._arrived.add(request_id)
        self._started_s[request_id] = self._finished_s[request_id] = self.now_s


class ClairvoyantPolicy(EvictionPolicy):
    """Evicts the entry that saves the least for its bytes and the time until it is used; entries that are never used
    first."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight

    def key(self, entry: EntryFacts) -> float:
        wait_s = 0.0 if entry.num_expected else self._foresight.wait_s(entry.block_hash)
        return entry.cost / max(entry.num_bytes, 1) / max(wait_s, SHORTEST_WAIT_S)


class DeclaredCapture(CapturePolicy):
    """Captures only breakpoints."""

    def positions(self, context: CaptureContext) -> Iterable[tuple[Origin, Iterable[int]]]:
        yield Origin.BREAKPOINT, context.breakpoints


class ForeseeingSystem(EngineReplica):
    """The engine with requests that declare the boundaries known by foresight. It reports to foresight what happens to
    them."""

    def __init__(self, options: EngineOptions, foresight: Foresight) -> None:
        super().__init__(options)
        self._foresight = foresight

    def add(self, request: TraceRequest) -> bool:
        foresight = self._foresight
        accepted = super().add(replace(request, breakpoints=foresight.breakpoints(request.id)))
        (foresight.arrive if accepted else foresight.refuse)(request.id)
        return accepted

    def plan(self, now_s: float) -> StepLoad | None:
        self._foresight.now_s = now_s
        load = super().plan(now_s)
        if load is not None and self._plan is not None:
            for added in self._plan.added:
                self._foresight.start(added.request_id)
        return load

    def finish(self, now_s: float) -> StepNews:
        self._foresight.now_s = now_s
        news = super().finish(now_s)
        for name in news.finished:
            self._foresight.finish(name)
        return news
