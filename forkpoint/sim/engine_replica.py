"""The engine's own scheduler and cache under simulated time: the whole engine without the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from forkpoint.cache.capture import CapturePolicy
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.tiers import NO_TIERS, TierSizes
from forkpoint.config import BLOCK_SIZE, CacheConfig, SchedulerConfig
from forkpoint.errors import RequestTooLargeError
from forkpoint.params import SamplingParams
from forkpoint.sched.plan import IntArray, Move, MoveKind, MoveRoute, StepPlan, StepResult
from forkpoint.sched.request import Request
from forkpoint.sched.scheduler import Scheduler
from forkpoint.sim.acceptance import SetAcceptance
from forkpoint.sim.cost import StepLoad
from forkpoint.sim.disk import NO_COPIES, SimulatedDisk
from forkpoint.sim.replica import ReplicaCounters, StepNews
from forkpoint.sim.trace import TraceRequest

DISK_RATE: Final = 6e9  # bytes per second: a drive of PCIe 4
# Copies between the device and the host's memory, which delay a step.
HOST_ROUTES: Final = frozenset(MoveRoute) - {MoveRoute.ARENA, *NO_COPIES}


@dataclass(frozen=True)
class EngineOptions:
    """Options of a simulated engine. Given policies override those that `cache` names."""

    layout: CacheLayout
    num_pages: int
    cache: CacheConfig
    scheduler: SchedulerConfig
    cost: RecomputeCost
    new_policy: Callable[[], EvictionPolicy] | None = None
    capture: CapturePolicy | None = None
    drafter: SetAcceptance | None = None
    tiers: TierSizes = NO_TIERS
    disk_rate: float = DISK_RATE  # bytes per second of the disk tier


class EngineReplica:
    """Drives a `Scheduler` as `EngineCore` does, with one step in flight. Sampled tokens come from the trace."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._now = 0.0
        self._disk = SimulatedDisk(options.layout.in_tiers(), options.disk_rate)
        arguments = vars(options) | {"tiers": replace(options.tiers, wall_clock=lambda: self._now)}
        del arguments["disk_rate"]  # the other options are arguments of Scheduler
        self.sched = Scheduler(**arguments, clock=lambda: self._now)
        self._requests: dict[str, Request] = {}
        self._outputs: dict[str, list[int]] = {}  # the outputs that the trace gives, by request id
        self._row_ids: dict[int, str] = {}
        self._plan: StepPlan | None = None
        self._counters = ReplicaCounters()
        self._block_bytes = sum(group.block_bytes for group in options.layout.groups)

    def add(self, request: TraceRequest) -> bool:
        """Queue a request. Return False if the arena can never hold it."""
        length = request.output.num_tokens
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        output = request.output.array().tolist()
        queued = Request(
            request.id,
            request.prompt.array(),
            params,
            length,
            seed=0,
            breakpoints=request.breakpoints,
            tool_call_token_ids=frozenset(output[-1:]) if request.awaits_tool else frozenset(),
        )
        try:
            self.sched.add(queued)
        except RequestTooLargeError:
            return False
        self._requests[request.id] = queued
        self._outputs[request.id] = output
        return True

    def plan(self, now_s: float) -> StepLoad | None:
        """Plan the next step and return its work; None if there is nothing to do."""
        self._now = now_s
        self._plan = plan = self.sched.schedule()
        if plan is None:
            return None
        for added in plan.added:
            self._row_ids[added.row] = added.request_id
        layout, counters = self.options.layout, self._counters
        load = load_of(plan, layout)
        self._disk.start(plan.moves, now_s)
        if plan.waits_for_tiers:
            load = replace(load, waits_s=self._disk.next_s(now_s) - now_s)
        counters.kv_written_bytes += load.num_tokens * self._block_bytes // BLOCK_SIZE
        counters.state_written_bytes += load.num_saves * layout.slot_bytes
        return load

    def finish(self, now_s: float) -> StepNews:
        """Finish the planned step at `now_s`: its rows get their tokens from the trace. Return what happened."""
        self._now = now_s
        plan = self._plan
        assert plan is not None
        prefills = plan.rows.row[plan.num_decodes :][plan.rows.samples[plan.num_decodes :]]
        first = tuple(self._row_ids[row] for row in prefills.tolist())
        tokens, counts = self._sample(plan)
        report = self._disk.next_report(now_s)
        result = StepResult(plan.step, tokens, num_tokens=plan.num_tokens, counts=counts, tier_report=report)
        updates = self.sched.apply(result)
        finished = {update.request.id: update.request.cache for update in updates if update.finish_reason is not None}
        for name in finished:
            del self._requests[name], self._outputs[name]
        return StepNews(first, finished)

    def _sample(self, plan: StepPlan) -> tuple[IntArray, IntArray | None]:
        """Return the next tokens of the sampled rows, row after row, and each row's count (None: one each)."""
        num_drafts, drafter = plan.rows.num_drafts[plan.rows.samples], self.options.drafter
        tokens: list[int] = []
        counts: list[int] = []
        for row, drafts in zip(plan.sampled_rows.tolist(), num_drafts.tolist(), strict=True):
            name = self._row_ids[row]
            count = 1
            if drafter is not None and drafts:
                count += drafter.accept(name, drafts)
            done = len(self._requests[name].output_token_ids)
            tokens += self._outputs[name][done : done + count]
            counts.append(count)
        sampled = np.asarray(tokens, np.int32)
        if not num_drafts.any():
            return sampled, None
        return sampled, np.asarray(counts, np.int32)

    def restorable(self, request: TraceRequest) -> int:
        """Return how many tokens of a request the arena's cache would give it now."""
        cache, prompt = self.sched.cache, request.prompt.array()
        return cache.lookup(cache.new_lease(request.id, "", prompt), len(prompt)).num_tokens

    def num_unfinished(self) -> int:
        return len(self._requests)

    def counters(self) -> ReplicaCounters:
        """Return the counters of cache and scheduler."""
        stats = self.sched.stats()
        counters, cache = self._counters, stats.cache
        counters.states_evicted = sum(cache.checkpoints_evicted.values())
        counters.blocks_evicted = cache.blocks_evicted
        counters.num_preemptions = stats.num_preemptions
        counters.lost_tokens = dict(cache.lost_tokens)
        counters.restored_tokens, counters.read_tokens = cache.host_hit_tokens, cache.disk_hit_tokens
        return counters


def load_of(plan: StepPlan, layout: CacheLayout) -> StepLoad:
    """Return the work of a plan, as the cost model counts it."""
    rows, num_decodes = plan.rows, plan.num_decodes
    prefill_tokens, prefill_pairs = plan.prefill_work()
    decoded, ends = rows.num_tokens[:num_decodes], (rows.start + rows.num_tokens)[:num_decodes].astype(np.int64)
    num_drafts = int(rows.num_drafts.sum())
    return StepLoad(
        prefill_tokens=prefill_tokens,
        prefill_pairs=prefill_pairs,
        num_segments=len(rows) - num_decodes,
        num_decodes=num_decodes,
        decode_kv_tokens=int((decoded * (2 * ends - decoded + 1)).sum()) // 2,
        num_saves=len(rows.save_slots),
        num_sampled=len(plan.sampled_rows) + num_drafts,
        copied_bytes=_num_bytes(plan.moves, {MoveRoute.ARENA}, layout, layout.slot_bytes),
        num_drafts=num_drafts,
        host_bytes=_num_bytes(plan.moves, HOST_ROUTES, layout, layout.stored_slot_bytes),
    )


def _num_bytes(moves: Iterable[Move], routes: Set[MoveRoute], layout: CacheLayout, slot_bytes: int) -> int:
    """Return the bytes of the units that moves of these routes copy, slots of `slot_bytes` among them."""
    copied = [move for move in moves if move.route in routes]
    if not copied:
        return 0
    blocks = [group.block_bytes for group in layout.groups]
    return sum(slot_bytes if move.kind is MoveKind.SLOT else blocks[move.group] for move in copied)
