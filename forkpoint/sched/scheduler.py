"""Who runs next. There are no phases: every step gives chunks to requests, whose tokens catch up."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

import numpy as np

from forkpoint.cache.capture import CapturePolicy
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.integrity import check_integrity
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.policies import CAPTURE
from forkpoint.config import BLOCK_SIZE, CacheConfig, SchedulerConfig
from forkpoint.errors import NonFiniteLogitsError, QueueFullError, RequestTooLargeError
from forkpoint.params import FinishReason
from forkpoint.sched.admission import Admission
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.drafting import DraftPlanner
from forkpoint.sched.plan import NO_ROW, StepPlan, StepResult
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.request import Request, RequestUpdate, follow
from forkpoint.sched.running import RunningSet
from forkpoint.sched.scheduled_request import IssuedStep, ScheduledRequest
from forkpoint.sched.stats import DraftStats, SchedulerStats


class Scheduler:
    """Plans steps for one runner.

    Call `schedule`, submit the plan, call `apply` with its result; with `async_scheduling`, `schedule` may be called
    again before `apply`. Results must be applied in the order of the plans. Not thread-safe.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        *,
        deterministic: bool = False,
        cost: RecomputeCost | None = None,
        policy: EvictionPolicy | None = None,
        capture: CapturePolicy | None = None,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.layout = layout
        self.config = scheduler
        self.cache = CacheManager(layout, num_pages, cache, deterministic=deterministic, cost=cost, policy=policy)
        self._waiting = WaitingQueue()
        self._issued: deque[IssuedStep] = deque()
        self._running = RunningSet(scheduler.max_num_seqs, self._issued)
        capture = capture or CAPTURE.find(cache.capture_policy)()
        interval = layout.capture_interval(cache.checkpoint_interval)
        self._drafting = DraftPlanner(drafter, self.cache, clock) if drafter is not None else None
        self._admission = Admission(self.cache, self._waiting, self._running, capture, interval, clock)
        self._requests: dict[str, ScheduledRequest] = {}
        self._suspects: deque[ScheduledRequest] = deque()  # of failed steps, each to be tried alone
        self._steps = itertools.count()
        self._arrivals = itertools.count()
        self._num_steps = 0
        self._num_preemptions = 0
        self._preempted_now = False

    # --- requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError, or RequestTooLargeError if the arena can never hold it."""
        if self.is_full:
            raise QueueFullError(
                f"{len(self._waiting.requests)} requests are waiting, the limit is "
                f"max_queue_len={self.config.max_queue_len}; try again later"
            )
        self.check(request)
        request.max_tokens = self._longest_answer(request)
        lease = self.cache.new_lease(request.id, request.params.cache_salt, request.prompt_token_ids)
        scheduled = ScheduledRequest(
            request, lease, (request.priority, next(self._arrivals)), waits_for_output=self._drafting is not None
        )
        self._wait(scheduled)
        self._requests[request.id] = scheduled

    def _wait(self, scheduled: ScheduledRequest) -> None:
        """Queue an scheduled. If others come before it, what it would resume from is to be there still after them."""
        request = scheduled.request
        if self._running.requests or self._waiting.requests:
            hit = self.cache.lookup(scheduled.lease, request.num_tokens, not request.wants_prompt_logprobs)
            scheduled.expected = hit.checkpoint
            self.cache.expect(scheduled.expected, 1)
        self._waiting.add(scheduled)

    def check(self, request: Request) -> None:
        """Raise RequestTooLargeError if even an otherwise empty arena cannot hold the request at its end, which comes
        where the arena is full if nobody asked for a length."""
        num_outputs = self._longest_answer(request)
        total = request.num_prompt_tokens + num_outputs
        if not self.cache.can_ever_fit(total):
            need = self.layout.num_pages_for(total, 1) * self.layout.page_bytes
            have = (self.cache.arena.num_pages - 1) * self.layout.page_bytes
            raise RequestTooLargeError(
                f"request {request.id}: {request.num_prompt_tokens} prompt + {num_outputs} output tokens need "
                f"{need} bytes of cache and the arena has {have}; shorten it or raise kv_cache_memory_bytes"
            )

    def _longest_answer(self, request: Request) -> int:
        """The length that was asked for, else as much as an otherwise empty arena holds; at least one token."""
        if request.params.max_tokens is not None or not self.layout.has_kv:
            return request.max_tokens
        longest = self.layout.longest_request(self.cache.arena.num_pages) - request.num_prompt_tokens
        return max(1, min(request.max_tokens, longest))

    @property
    def is_full(self) -> bool:
        """Whether `add` would refuse any request now."""
        return len(self._waiting.requests) >= self.config.max_queue_len

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._running.leaving or self._issued)

    def reset_prefix_cache(self) -> bool:
        """Nothing cached so far is found again."""
        self.cache.store.reset()
        return True

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running.requests),
            num_waiting=len(self._waiting.requests),
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            num_pages_held=self.cache.num_pages_held,
            num_slots_held=self.cache.num_slots_held,
            blocks_per_page=self.layout.blocks_per_page,
            slots_per_page=self.layout.slots_per_page,
            cache=self.cache.store.stats(),
            drafts=self._drafting.stats() if self._drafting is not None else DraftStats(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError naming what is off where pages, blocks, slots or checkpoints do not add up."""
        holding = itertools.chain(self._running.requests, self._running.leaving)
        check_integrity(self.cache, [scheduled.lease for scheduled in holding])

    # --- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be planned before a result arrives or a request is added."""
        self._preempted_now = False
        suspect, ahead = self._next_suspect() if self._suspects else None, set[ScheduledRequest]()
        if self._drafting is not None and self._issued and suspect is None:
            found = self._drafting.early_rows(self._running.requests)
            if found is None:
                return None
            ahead = found
        step, budget = next(self._steps), self.config.max_num_batched_tokens
        builder = PlanBuilder(step, budget, self.cache)
        if suspect is None:
            self._plan_all(builder, ahead)
        else:
            self._plan_alone(builder, suspect)
            if builder.budget == budget and not self._issued:  # others hold what it needs
                self._preempt_all()
                builder = PlanBuilder(step, budget, self.cache)
                self._plan_alone(builder, suspect)
        if builder.budget == budget:
            assert self._issued or not (len(self._running.requests) or len(self._waiting.requests)), (
                "nothing can run, yet requests wait"
            )
            return None
        issued = builder.finish(self._running.drain_removed() if self._running.removed_rows else ())
        if self._drafting is not None:
            self._drafting.begin(issued)
        self._issued.append(issued)
        self._num_steps += 1
        return issued.plan

    def _plan_all(self, builder: PlanBuilder, ahead: Collection[ScheduledRequest]) -> None:
        for scheduled in self._plan_decodes(builder, list(self._running.requests), ahead):
            if self._waiting.is_more_urgent(scheduled) and not self._preempted_now:
                self._admission.admit_waiting(builder, more_urgent_than=scheduled)
            if not scheduled.leaving and scheduled.row != NO_ROW:  # a decode may have preempted it
                self._plan_prefill(builder, scheduled)
        if self._waiting.requests and not self._preempted_now:
            self._admission.admit_waiting(builder)

    def _next_suspect(self) -> ScheduledRequest | None:
        """The first request of a failed step of which not all that the step had come to has been planned alone."""
        while self._suspects:
            scheduled = self._suspects[0]
            if not scheduled.ended and scheduled.lease.num_planned < scheduled.suspect_until:
                return scheduled
            self._suspects.popleft()
        return None

    def _plan_alone(self, builder: PlanBuilder, suspect: ScheduledRequest) -> None:
        if suspect.row == NO_ROW:
            self._admission.admit_waiting(builder, only=suspect)
        elif not suspect.leaving:
            for scheduled in self._plan_decodes(builder, [suspect]):
                self._plan_prefill(builder, scheduled)

    def _plan_decodes(
        self, builder: PlanBuilder, running: Iterable[ScheduledRequest], ahead: Collection[ScheduledRequest] = ()
    ) -> list[ScheduledRequest]:
        """Plan every row that decodes; returns those that are still in prefill. Of rows that wait for a result those
        that may go `ahead` of it do not."""
        step = builder.step
        in_prefill: list[ScheduledRequest] = []
        steady: list[ScheduledRequest] = []
        for scheduled in running:
            lease = scheduled.lease
            start = lease.num_planned
            if start < scheduled.prefill_end:
                in_prefill.append(scheduled)
            elif self._preempted_now and (scheduled.leaving or scheduled.row == NO_ROW):
                continue
            elif start >= scheduled.num_to_compute:
                continue  # its last token is in flight
            elif scheduled.waits_for_output:
                if start < scheduled.request.num_tokens or scheduled in ahead:  # else it depends on a token in flight
                    self._plan_decode(builder, scheduled)
            elif start % BLOCK_SIZE and start > scheduled.num_tokens_at_admission and not lease.has_duplicates:
                scheduled.last_step = step
                steady.append(scheduled)
            else:
                self._plan_decode(builder, scheduled)
        builder.add_steady(steady)
        return in_prefill

    def _plan_decode(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> None:
        """A decode step that may come to a block boundary, replay a known token or have drafts."""
        lease = scheduled.lease
        start = lease.num_planned
        if lease.in_reach:
            self.cache.extend(lease, scheduled.tokens_beyond_chain(start))
            self.cache.resolve_boundary(lease)
        self._drop_duplicates(builder, scheduled)
        # The block before the checkpoint: a checkpoint that its own request reads could not give way to it.
        while not self.cache.ensure_blocks(lease, start + 1):
            if not self._make_room(scheduled, builder, may_preempt_itself=True):
                return
        num_running = len(self._running.requests)
        drafts, masks = (
            self._drafting.plan(builder, scheduled, num_running) if self._drafting is not None else (None, ())
        )
        if start % BLOCK_SIZE < lease.num_last_step:
            if not self.cache.cross_boundary(lease, scheduled.tokens_beyond_chain(start)):
                return
            self._drop_duplicates(builder, scheduled)
        builder.add_decode(scheduled, drafts, masks)

    def _drop_duplicates(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> None:
        if scheduled.lease.has_duplicates:
            self.cache.drop_duplicates(scheduled.lease)
            builder.replace_prefix(scheduled)

    def _plan_prefill(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> None:
        self._drop_duplicates(builder, scheduled)
        self._try_jump(builder, scheduled)
        start = scheduled.lease.num_planned
        end = self._admission.chunk_end(start, scheduled.prefill_end, builder.budget)
        if end <= start:
            return
        while not self.cache.ensure_blocks(scheduled.lease, end):
            if not self._make_room(scheduled, builder, may_preempt_itself=False):
                end = min(end, scheduled.lease.num_blocks * BLOCK_SIZE)
                break
        if start < end:
            self._admission.add_chunk(builder, scheduled, start, end)

    def _try_jump(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> None:
        """If another request has meanwhile cached more of this prompt, go on from there."""
        lease, request = scheduled.lease, scheduled.request
        if lease.detached or request.wants_prompt_logprobs or not self.cache.continues(lease):
            return
        hit = self.cache.lookup(lease, scheduled.prefill_end)
        start = lease.num_planned
        if hit.num_tokens > start:
            self.cache.jump(lease, hit)
            builder.replace_prefix(scheduled)
            scheduled.record_hit(hit, gained=hit.num_tokens - start)

    def _make_room(self, scheduled: ScheduledRequest, builder: PlanBuilder, may_preempt_itself: bool) -> bool:
        """Preempt the last request in order that this step has not planned yet; False: `scheduled` must wait."""
        if self._running.leaving:
            return False  # their pages come back with the results in flight
        victim = self._running.last_unplanned(builder.step)
        if victim is None or victim.order < scheduled.order:
            return False
        if victim is scheduled:
            if may_preempt_itself and len(self._running.requests) > 1:
                self._preempt(scheduled)
            return False
        self._preempt(victim)
        return not self._running.leaving

    # --- leaving

    def _preempt(self, scheduled: ScheduledRequest) -> None:
        self._preempted_now = True
        self._num_preemptions += 1
        scheduled.request.num_preemptions += 1
        self._leave(scheduled)

    def _preempt_all(self) -> None:
        for scheduled in list(self._running.requests):
            self._preempt(scheduled)

    def abort(self, request_id: str) -> Request | None:
        """End a request at once, wherever it is, and return it; None if it is not known (or ended already)."""
        scheduled = self._requests.pop(request_id, None)
        if scheduled is None:
            return None
        scheduled.ended = True
        if self._drafting is not None:
            self._drafting.forget(scheduled.request)
        if scheduled.row == NO_ROW:
            self._waiting.remove(scheduled)
            self.cache.expect(scheduled.expected, -1)
            self.cache.forget_private(scheduled.lease, scheduled.request.num_prompt_tokens)
        elif not scheduled.leaving:
            self._leave(scheduled)
        return scheduled.request

    def _leave(self, scheduled: ScheduledRequest) -> None:
        if self._running.leave(scheduled):
            self._release(scheduled)

    def _release(self, scheduled: ScheduledRequest) -> None:
        """No plan in flight carries the scheduled any more: give back what it holds."""
        self._running.vacate(scheduled)
        request, lease = scheduled.request, scheduled.lease
        self.cache.extend(lease, scheduled.tokens_beyond_chain(request.num_tokens))
        is_known = lease.num_planned <= request.num_tokens  # not, where it ended before the last tokens computed
        scheduled.lease = self.cache.release(
            lease, donate=is_known, awaits_tool=scheduled.ended and request.awaits_tool
        )
        if scheduled.ended:
            self.cache.forget_private(lease, request.num_prompt_tokens)
            return
        scheduled.junctions = frozenset()
        self._wait(scheduled)

    # --- results

    def apply(self, result: StepResult) -> list[RequestUpdate]:
        """Take in the result of the oldest issued step."""
        issued = self._issued.popleft()
        assert issued.plan.step == result.step, f"result of step {result.step}, expected {issued.plan.step}"
        for checkpoint in issued.readers:
            self.cache.done_reading(checkpoint)
        sampled, ends = self._confirm(issued, result)
        if self._drafting is not None:
            self._drafting.count_accepted(issued, result)
        updates = self._take_prompt_logprobs(issued, result) if result.prompt_logprobs else []
        if result.failed_rows:
            failed = set(result.failed_rows)
            broken = [scheduled for scheduled in issued.requests if scheduled.row in failed and not scheduled.ended]
            updates += [self._fail_entry(scheduled) for scheduled in broken]
        logprobs = {row: iter(found) for row, found in result.logprobs.items()}
        for scheduled, token, end in zip(sampled, result.token_ids.tolist(), ends, strict=True):
            scheduled.lease.num_confirmed = end
            request, outputs = scheduled.request, scheduled.request.output_token_ids
            if scheduled.ended:
                continue
            outputs.append(token)
            found = next(logprobs[scheduled.row]) if logprobs and scheduled.row in logprobs else None
            if len(outputs) >= request.max_tokens or token in request.stop_token_ids or request.grammar is not None:
                ending = follow(request, token)
                if ending is not None:
                    self.abort(request.id)
                    updates.append(RequestUpdate(request, token, found, (), *ending))
                    continue
            updates.append(RequestUpdate(request, token, found))
        if self._running.leaving:
            self._release_ready()
        return updates

    def _confirm(self, issued: IssuedStep, result: StepResult) -> tuple[list[ScheduledRequest], list[int]]:
        """Count what the step confirmed of rows that were not sampled, and take back what it did not. Returns, for each
        token sampled, its scheduled and how many tokens of that are confirmed."""
        rows, requests, sampled = issued.plan.rows, issued.requests, issued.sampled
        ends = rows.start + rows.num_tokens
        if len(sampled) < len(requests):
            for i in np.flatnonzero(~rows.samples).tolist():
                self.cache.confirm(requests[i].lease, int(ends[i]))
        if self._drafting is not None:
            for i in np.flatnonzero(rows.optimistic).tolist():
                ends[i] = requests[i].lease.num_confirmed + rows.num_tokens[i]
        ends, counts = ends[rows.samples], result.counts
        if counts is None:
            return sampled, ends.tolist()
        rejected = 1 + rows.num_drafts[rows.samples] - counts
        for scheduled, num_rejected in zip(sampled, rejected.tolist(), strict=True):
            if num_rejected:
                self.cache.reject(scheduled.lease, num_rejected, scheduled.last_step == result.step)
        confirmed = [scheduled for scheduled, count in zip(sampled, counts.tolist(), strict=True) for _ in range(count)]
        return confirmed, np.repeat(ends - rejected, counts).tolist()

    def _release_ready(self) -> None:
        for scheduled in self._running.take_ready():
            self._release(scheduled)

    def _take_prompt_logprobs(self, issued: IssuedStep, result: StepResult) -> list[RequestUpdate]:
        updates = []
        for scheduled in issued.requests:
            news = result.prompt_logprobs.get(scheduled.row)
            if news is None or scheduled.ended or not scheduled.request.wants_prompt_logprobs:
                continue
            scheduled.request.prompt_logprobs_done = news[-1][0] == scheduled.request.num_prompt_tokens - 1
            updates.append(RequestUpdate(scheduled.request, prompt_logprobs=news))
        return updates

    def _fail_entry(self, scheduled: ScheduledRequest) -> RequestUpdate:
        """The model produced garbage for this request: end it, and let nobody reuse what it computed."""
        made, scheduled.lease.detached = list(scheduled.lease.filed), True
        self.abort(scheduled.request.id)
        self.cache.condemn(made)
        text = f"request {scheduled.request.id}: the model produced non-finite logits; check the weights and the dtype"
        return RequestUpdate(scheduled.request, finish_reason=FinishReason.ERROR, error=NonFiniteLogitsError(text))

    def fail(self, step: int, error: Exception) -> list[RequestUpdate]:
        """Step `step`, the oldest issued one, raised `error`. It and all later ones are undone: what they were to
        compute is condemned, and all requests wait to run again. A request that was alone in the step ends with the
        error; several are tried one at a time, as far as the step had come, so that none ends for another's fault."""
        assert self._issued and self._issued[0].plan.step == step
        in_step, updates = list(self._issued[0].requests), []
        made = self.cache.filing.drain()
        while self._issued:
            issued = self._issued.popleft()
            for checkpoint in issued.readers:
                self.cache.done_reading(checkpoint)
            made += issued.filed
            for scheduled in issued.requests:
                scheduled.lease.detached = True
        alive = [scheduled for scheduled in in_step if not scheduled.ended]
        if len(in_step) == 1:
            updates = [RequestUpdate(e.request, finish_reason=FinishReason.ERROR, error=error) for e in alive]
            for scheduled in alive:
                self.abort(scheduled.request.id)
        else:
            for scheduled in alive:
                scheduled.suspect_until = scheduled.lease.num_planned
            self._suspects = deque(sorted({*self._suspects, *alive}, key=lambda e: e.order))
        self._preempt_all()
        self._release_ready()
        self.cache.condemn(made)
        return updates
