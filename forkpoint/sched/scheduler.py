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
from forkpoint.sched.entry import Entry, IssuedStep
from forkpoint.sched.plan import NO_ROW, StepPlan, StepResult
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.request import Request, RequestUpdate, follow
from forkpoint.sched.running import RunningSet
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
        self._entries: dict[str, Entry] = {}
        self._suspects: deque[Entry] = deque()  # of failed steps, each to be tried alone
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
                f"{len(self._waiting.entries)} requests are waiting, the limit is "
                f"max_queue_len={self.config.max_queue_len}; try again later"
            )
        self.check(request)
        request.max_tokens = self._longest_answer(request)
        lease = self.cache.new_lease(request.id, request.params.cache_salt, request.prompt_token_ids)
        entry = Entry(request, lease, (request.priority, next(self._arrivals)), waits=self._drafting is not None)
        self._wait(entry)
        self._entries[request.id] = entry

    def _wait(self, entry: Entry) -> None:
        """Queue an entry. If others come before it, what it would resume from is to be there still after them."""
        request = entry.request
        if self._running.entries or self._waiting.entries:
            hit = self.cache.lookup(entry.lease, request.num_tokens, not request.wants_prompt_logprobs)
            entry.expected = hit.checkpoint
            self.cache.expect(entry.expected, 1)
        self._waiting.add(entry)

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
        return len(self._waiting.entries) >= self.config.max_queue_len

    def has_unfinished(self) -> bool:
        return bool(self._entries or self._running.leaving or self._issued)

    def reset_prefix_cache(self) -> bool:
        """Nothing cached so far is found again."""
        self.cache.store.reset()
        return True

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running.entries),
            num_waiting=len(self._waiting.entries),
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
        holding = itertools.chain(self._running.entries, self._running.leaving)
        check_integrity(self.cache, [entry.lease for entry in holding])

    # --- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be planned before a result arrives or a request is added."""
        self._preempted_now = False
        suspect, ahead = self._next_suspect() if self._suspects else None, set[Entry]()
        if self._drafting is not None and self._issued and suspect is None:
            found = self._drafting.ahead(self._running.entries)
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
            assert self._issued or not (len(self._running.entries) or len(self._waiting.entries)), (
                "nothing can run, yet requests wait"
            )
            return None
        issued = builder.finish(self._running.drain_removed() if self._running.removed_rows else ())
        if self._drafting is not None:
            self._drafting.begin(issued)
        self._issued.append(issued)
        self._num_steps += 1
        return issued.plan

    def _plan_all(self, builder: PlanBuilder, ahead: Collection[Entry]) -> None:
        for entry in self._plan_decodes(builder, list(self._running.entries), ahead):
            if self._waiting.is_more_urgent(entry) and not self._preempted_now:
                self._admission.admit_waiting(builder, more_urgent_than=entry)
            if not entry.leaving and entry.row != NO_ROW:  # a decode may have preempted it
                self._plan_prefill(builder, entry)
        if self._waiting.entries and not self._preempted_now:
            self._admission.admit_waiting(builder)

    def _next_suspect(self) -> Entry | None:
        """The first request of a failed step of which not all that the step had come to has been planned alone."""
        while self._suspects:
            entry = self._suspects[0]
            if not entry.ended and entry.lease.num_planned < entry.suspect_until:
                return entry
            self._suspects.popleft()
        return None

    def _plan_alone(self, builder: PlanBuilder, suspect: Entry) -> None:
        if suspect.row == NO_ROW:
            self._admission.admit_waiting(builder, only=suspect)
        elif not suspect.leaving:
            for entry in self._plan_decodes(builder, [suspect]):
                self._plan_prefill(builder, entry)

    def _plan_decodes(
        self, builder: PlanBuilder, running: Iterable[Entry], ahead: Collection[Entry] = ()
    ) -> list[Entry]:
        """Plan every row that decodes; returns those that are still in prefill. Of rows that wait for a result those
        that may go `ahead` of it do not."""
        step = builder.step
        in_prefill: list[Entry] = []
        steady: list[Entry] = []
        for entry in running:
            lease = entry.lease
            start = lease.num_planned
            if start < entry.prefill_end:
                in_prefill.append(entry)
            elif self._preempted_now and (entry.leaving or entry.row == NO_ROW):
                continue
            elif start >= entry.last:
                continue  # its last token is in flight
            elif entry.waits:
                if start < entry.request.num_tokens or entry in ahead:  # else it depends on a token in flight
                    self._plan_decode(builder, entry)
            elif start % BLOCK_SIZE and start > entry.num_known and not lease.has_duplicates:
                entry.planned_step = step
                steady.append(entry)
            else:
                self._plan_decode(builder, entry)
        builder.add_steady(steady)
        return in_prefill

    def _plan_decode(self, builder: PlanBuilder, entry: Entry) -> None:
        """A decode step that may come to a block boundary, replay a known token or have drafts."""
        lease = entry.lease
        start = lease.num_planned
        if lease.in_reach:
            self.cache.extend(lease, entry.tokens_beyond_chain(start))
            self.cache.settle(lease)
        self._drop_duplicates(builder, entry)
        # The block before the checkpoint: a checkpoint that its own request reads could not give way to it.
        while not self.cache.ensure_blocks(lease, start + 1):
            if not self._make_room(entry, builder, may_preempt_itself=True):
                return
        num_running = len(self._running.entries)
        drafts, masks = self._drafting.plan(builder, entry, num_running) if self._drafting is not None else (None, ())
        if start % BLOCK_SIZE < lease.num_last:
            if not self.cache.cross_boundary(lease, entry.tokens_beyond_chain(start)):
                return
            self._drop_duplicates(builder, entry)
        builder.add_decode(entry, drafts, masks)

    def _drop_duplicates(self, builder: PlanBuilder, entry: Entry) -> None:
        if entry.lease.has_duplicates:
            self.cache.drop_duplicates(entry.lease)
            builder.replace_prefix(entry)

    def _plan_prefill(self, builder: PlanBuilder, entry: Entry) -> None:
        self._drop_duplicates(builder, entry)
        self._try_jump(builder, entry)
        start = entry.lease.num_planned
        end = self._admission.chunk_end(start, entry.prefill_end, builder.budget)
        if end <= start:
            return
        while not self.cache.ensure_blocks(entry.lease, end):
            if not self._make_room(entry, builder, may_preempt_itself=False):
                end = min(end, entry.lease.num_blocks * BLOCK_SIZE)
                break
        if start < end:
            self._admission.add_chunk(builder, entry, start, end)

    def _try_jump(self, builder: PlanBuilder, entry: Entry) -> None:
        """If another request has meanwhile cached more of this prompt, go on from there."""
        lease, request = entry.lease, entry.request
        if lease.frozen or request.wants_prompt_logprobs or not self.cache.continues(lease):
            return
        hit = self.cache.lookup(lease, entry.prefill_end)
        start = lease.num_planned
        if hit.num_tokens > start:
            self.cache.jump(lease, hit)
            builder.replace_prefix(entry)
            entry.record_hit(hit, gained=hit.num_tokens - start)

    def _make_room(self, entry: Entry, builder: PlanBuilder, may_preempt_itself: bool) -> bool:
        """Preempt the last request in order that this step has not planned yet; False: `entry` must wait."""
        if self._running.leaving:
            return False  # their pages come back with the results in flight
        victim = self._running.last_unplanned(builder.step)
        if victim is None or victim.order < entry.order:
            return False
        if victim is entry:
            if may_preempt_itself and len(self._running.entries) > 1:
                self._preempt(entry)
            return False
        self._preempt(victim)
        return not self._running.leaving

    # --- leaving

    def _preempt(self, entry: Entry) -> None:
        self._preempted_now = True
        self._num_preemptions += 1
        entry.request.num_preemptions += 1
        self._leave(entry)

    def _preempt_all(self) -> None:
        for entry in list(self._running.entries):
            self._preempt(entry)

    def abort(self, request_id: str) -> Request | None:
        """End a request at once, wherever it is, and return it; None if it is not known (or ended already)."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        entry.ended = True
        if self._drafting is not None:
            self._drafting.forget(entry.request)
        if entry.row == NO_ROW:
            self._waiting.remove(entry)
            self.cache.expect(entry.expected, -1)
            self.cache.forget_private(entry.lease, entry.request.num_prompt_tokens)
        elif not entry.leaving:
            self._leave(entry)
        return entry.request

    def _leave(self, entry: Entry) -> None:
        if self._running.leave(entry):
            self._settle_leaving(entry)

    def _settle_leaving(self, entry: Entry) -> None:
        """No plan in flight carries the entry any more: give back what it holds."""
        self._running.vacate(entry)
        request, lease = entry.request, entry.lease
        self.cache.extend(lease, entry.tokens_beyond_chain(request.num_tokens))
        is_known = lease.num_planned <= request.num_tokens  # not, where it ended before the last tokens computed
        entry.lease = self.cache.release(lease, donate=is_known, awaits_tool=entry.ended and request.awaits_tool)
        if entry.ended:
            self.cache.forget_private(lease, request.num_prompt_tokens)
            return
        entry.junctions = frozenset()
        self._wait(entry)

    # --- results

    def apply(self, result: StepResult) -> list[RequestUpdate]:
        """Take in the result of the oldest issued step."""
        issued = self._issued.popleft()
        assert issued.plan.step == result.step, f"result of step {result.step}, expected {issued.plan.step}"
        for checkpoint in issued.readers:
            self.cache.done_reading(checkpoint)
        sampled, ends = self._confirm(issued, result)
        if self._drafting is not None:
            self._drafting.settle(issued, result)
        updates = self._take_prompt_logprobs(issued, result) if result.prompt_logprobs else []
        if result.failed_rows:
            failed = set(result.failed_rows)
            broken = [entry for entry in issued.entries if entry.row in failed and not entry.ended]
            updates += [self._fail_entry(entry) for entry in broken]
        logprobs = {row: iter(found) for row, found in result.logprobs.items()}
        for entry, token, end in zip(sampled, result.token_ids.tolist(), ends, strict=True):
            entry.lease.num_confirmed = end
            request, outputs = entry.request, entry.request.output_token_ids
            if entry.ended:
                continue
            outputs.append(token)
            found = next(logprobs[entry.row]) if logprobs and entry.row in logprobs else None
            if len(outputs) >= request.max_tokens or token in request.stop_token_ids or request.grammar is not None:
                ending = follow(request, token)
                if ending is not None:
                    self.abort(request.id)
                    updates.append(RequestUpdate(request, token, found, (), *ending))
                    continue
            updates.append(RequestUpdate(request, token, found))
        if self._running.leaving:
            self._settle_all_leaving()
        return updates

    def _confirm(self, issued: IssuedStep, result: StepResult) -> tuple[list[Entry], list[int]]:
        """Count what the step confirmed of rows that were not sampled, and take back what it did not. Returns, for each
        token sampled, its entry and how many tokens of that are confirmed."""
        rows, entries, sampled = issued.plan.rows, issued.entries, issued.sampled
        ends = rows.start + rows.num_tokens
        if len(sampled) < len(entries):
            for i in np.flatnonzero(~rows.samples).tolist():
                self.cache.confirm(entries[i].lease, int(ends[i]))
        if self._drafting is not None:
            for i in np.flatnonzero(rows.ahead).tolist():
                ends[i] = entries[i].lease.num_confirmed + rows.num_tokens[i]
        ends, counts = ends[rows.samples], result.counts
        if counts is None:
            return sampled, ends.tolist()
        rejected = 1 + rows.num_drafts[rows.samples] - counts
        for entry, num_rejected in zip(sampled, rejected.tolist(), strict=True):
            if num_rejected:
                self.cache.reject(entry.lease, num_rejected, entry.planned_step == result.step)
        confirmed = [entry for entry, count in zip(sampled, counts.tolist(), strict=True) for _ in range(count)]
        return confirmed, np.repeat(ends - rejected, counts).tolist()

    def _settle_all_leaving(self) -> None:
        for entry in self._running.take_ready():
            self._settle_leaving(entry)

    def _take_prompt_logprobs(self, issued: IssuedStep, result: StepResult) -> list[RequestUpdate]:
        updates = []
        for entry in issued.entries:
            news = result.prompt_logprobs.get(entry.row)
            if news is None or entry.ended or not entry.request.wants_prompt_logprobs:
                continue
            entry.request.prompt_logprobs_done = news[-1][0] == entry.request.num_prompt_tokens - 1
            updates.append(RequestUpdate(entry.request, prompt_logprobs=news))
        return updates

    def _fail_entry(self, entry: Entry) -> RequestUpdate:
        """The model produced garbage for this request: end it, and let nobody reuse what it computed."""
        made, entry.lease.frozen = list(entry.lease.made), True
        self.abort(entry.request.id)
        self.cache.condemn(made)
        text = f"request {entry.request.id}: the model produced non-finite logits; check the weights and the dtype"
        return RequestUpdate(entry.request, finish_reason=FinishReason.ERROR, error=NonFiniteLogitsError(text))

    def fail(self, step: int, error: Exception) -> list[RequestUpdate]:
        """Step `step`, the oldest issued one, raised `error`. It and all later ones are undone: what they were to
        compute is condemned, and all requests wait to run again. A request that was alone in the step ends with the
        error; several are tried one at a time, as far as the step had come, so that none ends for another's fault."""
        assert self._issued and self._issued[0].plan.step == step
        in_step, updates = list(self._issued[0].entries), []
        made = self.cache.filing.drain()
        while self._issued:
            issued = self._issued.popleft()
            for checkpoint in issued.readers:
                self.cache.done_reading(checkpoint)
            made += issued.made
            for entry in issued.entries:
                entry.lease.frozen = True
        alive = [entry for entry in in_step if not entry.ended]
        if len(in_step) == 1:
            updates = [RequestUpdate(e.request, finish_reason=FinishReason.ERROR, error=error) for e in alive]
            for entry in alive:
                self.abort(entry.request.id)
        else:
            for entry in alive:
                entry.suspect_until = entry.lease.num_planned
            self._suspects = deque(sorted({*self._suspects, *alive}, key=lambda e: e.order))
        self._preempt_all()
        self._settle_all_leaving()
        self.cache.condemn(made)
        return updates
