"""The scheduler: one plan per step. There are no phases: a step mixes decode rows and chunks of prompts."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from forkpoint.cache.capture import CapturePolicy
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.integrity import check_integrity
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.policies import new_capture_policy
from forkpoint.cache.tiers import NO_TIERS, TierSizes
from forkpoint.config import BLOCK_SIZE, CacheConfig, SchedulerConfig
from forkpoint.errors import NonFiniteLogitsError, QueueFullError
from forkpoint.params import FinishReason
from forkpoint.sched.admission import Admission
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.chunks import Chunks
from forkpoint.sched.departures import Departures
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.drafting import DraftPlanner
from forkpoint.sched.encoder_budget import EncoderBudget
from forkpoint.sched.handover import Handover
from forkpoint.sched.issued_step import IssuedStep
from forkpoint.sched.plan import NO_ROW, IntArray, StepPlan, StepResult, TokenLogprobs
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.request import Request, RequestUpdate, follow
from forkpoint.sched.retries import Retries
from forkpoint.sched.running import RunningSet
from forkpoint.sched.scheduled_request import ScheduledRequest
from forkpoint.sched.sizes import check_size, longest_answer
from forkpoint.sched.stats import DraftStats, EncoderStats, SchedulerStats
from forkpoint.sched.step_pace import StepPace


class Scheduler:
    """Plans steps for one runner.

    Call `schedule`, submit the plan, and call `apply` with its result, or `fail` with its error. With
    `async_scheduling` the next plan may be made before that. Apply results in the order of the plans. Not thread-safe.
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
        new_policy: Callable[[], EvictionPolicy] | None = None,
        capture: CapturePolicy | None = None,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tiers: TierSizes = NO_TIERS,
        state_write_interval: int = 1,
        has_images: bool = True,
    ) -> None:
        """`state_write_interval`: tokens between two writes of a state, if its layers allow more than one.

        `has_images`: the runner has a vision tower, so that requests may have images.
        """
        self.layout = layout
        self._interval = state_write_interval
        self.config = scheduler
        self.cache = CacheManager(
            layout,
            num_pages,
            cache,
            deterministic=deterministic,
            cost=cost,
            new_policy=new_policy,
            clock=clock,
            tiers=tiers,
        )
        self._tiers = self.cache.tiers
        self._waiting = WaitingQueue()
        self._issued: deque[IssuedStep] = deque()
        self._running = RunningSet(scheduler.max_num_seqs, self._issued)
        capture = capture or new_capture_policy(cache.capture_policy)
        self._encoder: EncoderBudget | None = None
        if has_images:
            self._encoder = EncoderBudget(scheduler.encoder_budget, scheduler.encoder_cache_size)
        interval = layout.capture_interval(cache.checkpoint_interval)
        self._chunks = Chunks(self.cache, self._waiting, capture, interval, self._encoder)
        self._admission = Admission(self.cache, self._waiting, self._running, self._chunks, clock)
        self._departures = Departures(self.cache, self._running, self._admission, state_write_interval)
        self._pace: StepPace | None = None
        if scheduler.max_inter_token_latency_ms is not None:
            self._pace = StepPace(scheduler.max_inter_token_latency_ms / 1000)
        self._drafting: DraftPlanner | None = None
        if drafter is not None:
            self._drafting = DraftPlanner(drafter, self.cache, self._waiting, self._running, self._pace)
        self._handover = Handover(self.cache, self._issued)
        self._clock, self._ended_s = clock, 0.0  # when the last step ended
        self._requests: dict[str, ScheduledRequest] = {}
        self._retries = Retries()
        self._steps = itertools.count()
        self._arrivals = itertools.count()
        self._num_steps = 0

    # --- requests

    def add(self, request: Request) -> None:
        """Queue a request. Its `max_tokens` is cut to what the arena can hold, unless the caller chose it.

        Raises QueueFullError, or RequestTooLargeError if the arena can never hold it.
        """
        if self.is_full:
            raise QueueFullError(
                f"{len(self._waiting.requests)} requests are waiting, the limit is "
                f"max_queue_len={self.config.max_queue_len}; try again later"
            )
        check_size(request, self.cache)
        request.max_tokens = longest_answer(request, self.cache)
        salt, images = request.params.cache_salt, request.images
        lease = self.cache.new_lease(request.id, salt, request.prompt_token_ids, images)
        order = request.priority, next(self._arrivals)
        scheduled = ScheduledRequest(request, lease, order, waits_for_output=self._drafting is not None)
        self._handover.take_up(scheduled)
        self._admission.enqueue(scheduled)
        self._requests[request.id] = scheduled

    def abort(self, request_id: str) -> Request | None:
        """End a request at once and return it; None if there is no such request, or it has ended already."""
        scheduled = self._requests.pop(request_id, None)
        if scheduled is None:
            return None
        scheduled.ended = True
        self._handover.abandon(scheduled)
        if self._drafting is not None:
            self._drafting.forget(scheduled.request)
        if scheduled.row == NO_ROW:
            self._admission.withdraw(scheduled)
            self.cache.forget_private(scheduled.lease, scheduled.request.num_prompt_tokens)
        elif not scheduled.leaving:
            self._departures.leave(scheduled)
        return scheduled.request

    @property
    def is_full(self) -> bool:
        """Whether `add` would refuse any request now."""
        return len(self._waiting.requests) >= self.config.max_queue_len

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._issued) or self._tiers.has_unsent

    @property
    def has_copies_alone(self) -> bool:
        """Whether the next plan only carries copies for other engines."""
        peers = self._tiers.peers
        return peers is not None and peers.has_unsent and not self._requests

    def reset_prefix_cache(self) -> None:
        """Let nothing cached so far be found again, embeddings of images included."""
        self.cache.reset()
        if self._encoder is not None:
            self._encoder.clear()

    def stats(self) -> SchedulerStats:
        """Return gauges as they are now and counters since the start."""
        drafts, encoder = DraftStats(), EncoderStats()
        if self._drafting is not None:
            drafts = self._drafting.stats()
        if self._encoder is not None:
            encoder = self._encoder.stats
        return SchedulerStats(
            num_running=len(self._running.requests),
            num_waiting=len(self._waiting.requests),
            num_preemptions=self._departures.num_preemptions,
            num_steps=self._num_steps,
            num_pages_held=self.cache.room.num_pages_held,
            num_slots_held=self.cache.room.num_slots_held,
            blocks_per_page=self.layout.blocks_per_page,
            slots_per_page=self.layout.slots_per_page,
            cache=self.cache.stats(),
            drafts=drafts,
            encoder=encoder,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError that names what is off if pages, blocks, slots or checkpoints do not add up."""
        check_integrity(self.cache, [each.lease for each in (*self._running.requests, *self._running.leaving)])

    # --- planning

    def schedule(self) -> StepPlan | None:
        """Return the next step's plan, which is in flight from then on.

        None if nothing can be planned before a result arrives or a request is added.
        """
        if self._encoder is not None:
            self._encoder.begin_step()
        suspect, early = self._retries.next(), set[ScheduledRequest]()
        if self._drafting is not None:
            self._drafting.begin_plan(self.config.max_num_batched_tokens)
            if self._issued and suspect is None:
                found = self._drafting.early_rows()
                if found is None:
                    return None
                early = found
        step, budget = next(self._steps), self.config.max_num_batched_tokens
        self._tiers.begin_plan(is_busy=bool(self._running.requests))
        builder = PlanBuilder(step, budget, self.cache, self._interval)
        if suspect is None:
            self._plan_all(builder, early)
        else:
            self._tiers.restoring.drop()  # it may hold memory that this request needs, and no other request is planned
            self._plan_alone(builder, suspect)
            if builder.budget == budget and not self._issued:  # other requests hold the memory that it needs
                self._departures.preempt_all()
                builder = PlanBuilder(step, budget, self.cache, self._interval)
                self._plan_alone(builder, suspect)
        # A step in flight may fail. Copies of what it computes have to reach the runner before that is known.
        has_copies = self._tiers.has_copies or bool(self._issued and self.cache.arena.moves)
        is_empty = builder.budget == budget and not has_copies
        waits = is_empty and not self._issued and self._tiers.is_reading
        if is_empty and not waits:
            has_requests = bool(self._running.requests or self._waiting.requests)
            assert self._issued or not has_requests, "nothing can run, yet requests wait"
            return None
        dropped_images: tuple[bytes, ...] = ()
        if self._encoder is not None:
            dropped_images = self._encoder.drain_dropped()
        issued = builder.finish(*self._running.drain_removed(), dropped_images, waits_for_tiers=waits)
        if self._drafting is not None:
            self._drafting.note_plan(issued.plan)
        issued.planned_s = self._clock()
        self._issued.append(issued)
        self._num_steps += 1
        return issued.plan

    def plan_save(self) -> StepPlan | None:
        """Return a plan that stores cached entries in the disk tier before the engine closes; None once all are stored.

        Before each call apply the results of all earlier plans. Plan nothing else afterwards.
        """
        if not self._tiers.save_to_disk():
            return None
        builder = PlanBuilder(next(self._steps), 0, self.cache, self._interval)
        issued = builder.finish(*self._running.drain_removed(), waits_for_tiers=True)
        self._issued.append(issued)
        return issued.plan

    def _plan_all(self, builder: PlanBuilder, early: Collection[ScheduledRequest]) -> None:
        """Plan decode rows, then running prefills in order, then waiting requests.

        With a limit on the time between tokens, prompts next to decode rows get what fits in the rest of that time.
        """
        num_preempted_before = self._departures.num_preemptions
        in_prefill = self._plan_decodes(builder, list(self._running.requests), early)
        if self._pace is not None and builder.num_rows:
            builder.cap(self._pace.num_tokens)
        for scheduled in in_prefill:
            nobody_left = self._departures.num_preemptions == num_preempted_before
            if nobody_left and self._waiting.is_more_urgent(scheduled):
                self._admission.admit_waiting(builder, more_urgent_than=scheduled)
            if not scheduled.leaving and scheduled.row != NO_ROW:  # a decode row may have preempted it
                self._plan_prefill(builder, scheduled)
        if self._waiting.requests and self._departures.num_preemptions == num_preempted_before:
            self._admission.admit_waiting(builder)

    def _plan_alone(self, builder: PlanBuilder, suspect: ScheduledRequest) -> None:
        if suspect.row == NO_ROW:
            self._admission.admit_waiting(builder, only=suspect)
        elif not suspect.leaving:
            for scheduled in self._plan_decodes(builder, [suspect]):
                self._plan_prefill(builder, scheduled)

    def _plan_decodes(
        self,
        builder: PlanBuilder,
        running: Iterable[ScheduledRequest],
        early: Collection[ScheduledRequest] = (),
    ) -> list[ScheduledRequest]:
        """Plan every running row that can decode, and return the requests that are still in prefill.

        A row that waits for its last output is planned only if it is among the `early` ones.
        """
        step, departures = builder.step, self._departures
        num_preempted_before = departures.num_preemptions
        in_prefill: list[ScheduledRequest] = []
        steady: list[ScheduledRequest] = []
        for scheduled in running:
            lease, request = scheduled.lease, scheduled.request
            start = lease.num_planned
            if start < scheduled.prefill_end:
                in_prefill.append(scheduled)
            elif departures.num_preemptions != num_preempted_before and (scheduled.leaving or scheduled.row == NO_ROW):
                continue  # it was preempted for a row before it
            elif start >= scheduled.num_to_compute:  # its last token is in flight
                self._handover.offer_computed(scheduled)
            elif scheduled.waits_for_output or (request.grammar is not None and request.is_constrained):
                if start < request.num_tokens or scheduled in early:
                    self._plan_decode(builder, scheduled)
            elif start % BLOCK_SIZE and start > scheduled.num_tokens_at_admission and not lease.has_duplicates:
                scheduled.last_step = step
                steady.append(scheduled)
            else:
                self._plan_decode(builder, scheduled)
        builder.add_steady(steady)
        return in_prefill

    def _plan_decode(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> None:
        """Plan a decode step that may come to a block boundary, replay an earlier output or have drafts.

        Requests may be preempted for its blocks. Nothing is planned if the row has to wait.
        """
        lease = scheduled.lease
        start = lease.num_planned
        if lease.in_reach:
            self.cache.extend(lease, scheduled.tokens_beyond_chain(start))
            self.cache.boundaries.resolve(lease)
        builder.drop_duplicates(scheduled)
        # Blocks come before the checkpoint: one that its own request reads could not give way to a block.
        while not self.cache.ensure_blocks(lease, start + 1):
            if not self._departures.make_room(scheduled, builder.step, may_preempt_itself=True):
                return
        drafts: IntArray | None = None
        masks: Sequence[IntArray] = ()
        if self._drafting is not None:
            drafts, masks = self._drafting.plan(builder, scheduled)
        if start % BLOCK_SIZE < lease.num_last_step:  # the last step came to a boundary or passed one
            self.cache.extend(lease, scheduled.tokens_beyond_chain(start))
            if not self.cache.boundaries.cross(lease):
                return
            builder.drop_duplicates(scheduled)
        builder.add_decode(scheduled, drafts, masks)

    def _plan_prefill(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> None:
        builder.drop_duplicates(scheduled)
        self._admission.try_jump(builder, scheduled)
        start = scheduled.lease.num_planned
        end = self._chunks.end(scheduled.request, start, scheduled.prefill_end, builder.budget)
        if end <= start:
            return
        while not self.cache.ensure_blocks(scheduled.lease, end):
            if not self._departures.make_room(scheduled, builder.step, may_preempt_itself=False):
                end = min(end, scheduled.lease.num_blocks * BLOCK_SIZE)
                break
        if start < end:
            self._handover.offer_computed(scheduled)
            self._chunks.add(builder, scheduled, start, end)

    # --- results

    def apply(self, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of the oldest step in flight, and return what it means for each request.

        Requests that it ends give back what they hold. AssertionError if it is another step's result.
        """
        issued = self._issued.popleft()
        assert issued.plan.step == result.step, f"result of step {result.step}, expected {issued.plan.step}"
        began_s, self._ended_s = max(self._ended_s, issued.planned_s), self._clock()
        seconds = self._ended_s - began_s  # for which the device worked on the step
        self._time_step(issued.plan, seconds)
        if result.tier_report is not None or result.fetch_report is not None:
            self._tiers.apply_reports(result.tier_report, result.fetch_report)
        for checkpoint in issued.readers:
            self.cache.done_reading(checkpoint)
        sampled, ends = issued.confirm_tokens(result)
        if self._drafting is not None:
            self._drafting.count_accepted(issued, result, seconds)
        updates: list[RequestUpdate] = []
        if result.prompt_logprobs:
            updates += issued.take_prompt_logprobs(result)
        if result.failed_rows:
            failed = set(result.failed_rows)
            broken = [scheduled for scheduled in issued.requests if scheduled.row in failed and not scheduled.ended]
            updates += [self._fail_request(scheduled) for scheduled in broken]
        logprobs = {row: iter(found) for row, found in result.logprobs.items()}
        for scheduled, token, end in zip(sampled, result.token_ids.tolist(), ends, strict=True):
            scheduled.lease.num_confirmed = end
            request, outputs = scheduled.request, scheduled.request.output_token_ids
            if scheduled.ended:
                continue
            outputs.append(token)
            found: TokenLogprobs | None = None
            if logprobs and scheduled.row in logprobs:
                found = next(logprobs[scheduled.row])
            if len(outputs) >= request.max_tokens or token in request.stop_token_ids or request.grammar is not None:
                ending = follow(request, token)
                if ending is not None:
                    self._handover.offer(scheduled)
                    self.abort(request.id)
                    updates.append(RequestUpdate(request, token, found, (), *ending))
                    continue
            updates.append(RequestUpdate(request, token, found))
        if self._running.leaving:
            self._departures.release_ready()
        return updates

    def _time_step(self, plan: StepPlan, seconds: float) -> None:
        """Take in how long the device worked on a step."""
        if self._pace is None and not self._tiers.load_choices:
            return
        num_prompt_tokens, num_pairs = plan.prefill_work()
        if self._pace is not None and plan.num_tokens:  # other steps only wait or copy
            self._pace.add(num_prompt_tokens, seconds)
        for choice in self._tiers.load_choices:
            choice.note_step(num_prompt_tokens, num_pairs, seconds)

    def _fail_request(self, scheduled: ScheduledRequest) -> RequestUpdate:
        """End a request whose logits were not finite, let nobody reuse what it computed; return its update."""
        filed, scheduled.lease.detached = list(scheduled.lease.filed), True
        if self._encoder is not None:
            self._encoder.forget(scheduled.request.images)  # their embeddings may be the cause
        self.abort(scheduled.request.id)
        self._tiers.condemn_everywhere(filed)
        text = f"request {scheduled.request.id}: the model produced non-finite logits; check the weights and the dtype"
        return RequestUpdate(scheduled.request, finish_reason=FinishReason.ERROR, error=NonFiniteLogitsError(text))

    def fail(self, step: int, error: Exception) -> list[RequestUpdate]:
        """Undo step `step`, the oldest in flight, which raised `error`, and all later ones.

        Entries that these steps compute are condemned, and their requests wait to run again. A request that was alone
        in the step ends with the error. Several are retried one at a time, so that none ends for the fault of another.
        """
        assert self._issued and self._issued[0].plan.step == step
        in_step = list(self._issued[0].requests)
        self._tiers.restoring.drop()
        filed = self.cache.filing.drain()
        if self._encoder is not None:
            self._encoder.clear()  # the runner has computed only some of the embeddings
        while self._issued:
            issued = self._issued.popleft()
            for checkpoint in issued.readers:
                self.cache.done_reading(checkpoint)
            filed += issued.filed
            for scheduled in issued.requests:
                scheduled.lease.detached = True
        updates: list[RequestUpdate] = []
        alive = [scheduled for scheduled in in_step if not scheduled.ended]
        if len(in_step) > 1:
            self._retries.add(alive)
        else:
            for scheduled in alive:
                updates.append(RequestUpdate(scheduled.request, finish_reason=FinishReason.ERROR, error=error))
                self.abort(scheduled.request.id)
        self._departures.preempt_all()
        self._departures.release_ready()
        self._tiers.condemn_everywhere(filed)
        return updates
