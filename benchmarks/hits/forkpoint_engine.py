"""Plays the cases on forkpoint's own scheduler and cache, with the layout of the 35B model."""

from __future__ import annotations

from benchmarks.hits.cases import Case
from forkpoint.config import GIB, SchedulerConfig
from forkpoint.sched.scheduled_request import ScheduledRequest
from forkpoint.sim.engine_replica import EngineReplica
from forkpoint.sim.named_systems import engine_options
from forkpoint.sim.shape import QWEN3_5_35B

MEMORY_BYTES = 60 * GIB  # no case evicts anything


def play(case: Case) -> int:
    """Return the cached tokens of a case's last request."""
    replica = EngineReplica(engine_options("", QWEN3_5_35B, MEMORY_BYTES, SchedulerConfig()))
    for requests in case.rounds:
        for request in requests:
            if not replica.add(request):
                raise RuntimeError(f"{request.id!r} of case {case.key!r} does not fit {MEMORY_BYTES} bytes")
        measured = replica.sched._requests.get(case.measured.id)
        while replica.plan(0.0) is not None:
            replica.finish(0.0)
            if case.preempt_after and measured is not None:
                _preempt_once(replica, measured, case.preempt_after)
    assert measured is not None
    report = measured.request.resume_cache if case.preempt_after else measured.request.cache
    assert report is not None
    return report.num_cached_tokens


def _preempt_once(replica: EngineReplica, scheduled: ScheduledRequest, num_outputs: int) -> None:
    """Preempt a request as the scheduler does when the arena is full."""
    request = scheduled.request
    if not request.num_preemptions and len(request.output_token_ids) >= num_outputs:
        replica.sched._departures.preempt(scheduled)
