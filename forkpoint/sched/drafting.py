"""Drafts in plans: how many a row gets, which its grammar allows, and how many were accepted."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from forkpoint.cache.manager import CacheManager
from forkpoint.config import BLOCK_SIZE
from forkpoint.errors import StructuredOutputError
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.issued_step import IssuedStep
from forkpoint.sched.plan import IntArray, StepPlan, StepResult
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.request import Grammar, Request
from forkpoint.sched.running import RunningSet
from forkpoint.sched.scheduled_request import ScheduledRequest
from forkpoint.sched.stats import DraftStats
from forkpoint.sched.step_pace import StepPace

MOST_MISSING = 1 / 4  # share of decode rows that may miss a step that is planned early


class DraftPlanner:
    """Asks the drafter for drafts of decode rows, and counts what was accepted.

    Drafts take only the room that prompts leave in a step: if prompts fill it, each draft displaces a prompt token.
    """

    def __init__(
        self,
        drafter: Drafter,
        cache: CacheManager,
        waiting: WaitingQueue,
        running: RunningSet,
        pace: StepPace | None,
    ) -> None:
        """`pace` limits the prompt tokens of steps with decode rows. None: only the step's budget does."""
        self._drafter, self._cache, self._pace = drafter, cache, pace
        self._waiting, self._running = waiting, running
        self._is_blocked = False  # whether memory had no room for a waiting request in the last step
        self._num_left = 0  # drafts that the step under construction may still get
        self._num_drafts = self._num_tokens = 0
        self._accepted: Counter[int] = Counter()  # by position in the draft

    def begin_plan(self, budget: int) -> None:
        """Set how many drafts the next step may have: what the running rows and the prompts leave of its `budget`."""
        room = max(0, budget - len(self._running.requests))
        num_prompt_tokens = self._num_prompt_tokens(room)
        if num_prompt_tokens and self._pace is not None:
            room = min(room, self._pace.num_tokens)
        self._num_left = room - max(BLOCK_SIZE, num_prompt_tokens)

    def _num_prompt_tokens(self, most: int) -> int:
        """Return how many tokens of running and waiting prompts the next step could compute, at most `most`.

        A waiting prompt counts for each free row, without the tokens that it would find cached. None counts if the last
        step admitted nothing although requests waited, because then memory has no room for them.
        """
        total = 0
        for scheduled in self._running.requests:
            total += max(0, scheduled.prefill_end - scheduled.lease.num_planned)
            if total >= most:
                return most
        if self._is_blocked:
            return total
        for scheduled in itertools.islice(self._waiting.requests, len(self._running.free_rows)):
            total += scheduled.request.num_tokens
            if scheduled.expected is not None:
                total -= scheduled.expected.num_tokens
            if total >= most:
                return most
        return total

    def early_rows(self) -> set[ScheduledRequest] | None:
        """Return the rows that may be planned before the result of their step in flight.

        None: too many rows cannot be planned early or would get better drafts later. Then it is better to plan all rows
        together once the result is there.
        """
        decoding = [
            scheduled
            for scheduled in self._running.requests
            if scheduled.prefill_end <= scheduled.lease.num_planned < scheduled.num_to_compute
        ]
        found, may_miss = set[ScheduledRequest](), int(MOST_MISSING * len(decoding))
        for scheduled in decoding:
            if scheduled.lease.num_planned < scheduled.request.num_tokens:
                continue
            can = self._may_plan_early(scheduled)
            if can:
                found.add(scheduled)
            if not can or (self._num_left > 0 and not self._drafter.plans_early(scheduled.request, scheduled.lease)):
                may_miss -= 1
            if may_miss < 0:
                return None
        return found

    def _may_plan_early(self, scheduled: ScheduledRequest) -> bool:
        """Return whether the row's next step can be planned although its start depends on drafts in flight.

        Nothing that changes its outputs may depend on that start: neither a grammar, nor `min_tokens`, nor, in
        deterministic mode, the number of blocks.
        """
        request, end = scheduled.request, scheduled.lease.num_planned
        if request.is_constrained:
            return False
        if end > request.num_tokens:
            placed = request.params.min_tokens > len(request.output_token_ids)
            crosses = self._cache.deterministic and (request.num_tokens - 1) // BLOCK_SIZE != end // BLOCK_SIZE
            return not (placed or crosses)
        return True

    def plan(self, builder: PlanBuilder, scheduled: ScheduledRequest) -> tuple[IntArray | None, Sequence[IntArray]]:
        """Return drafts for the row's next step and the grammar's masks after each of them; None: no drafts.

        Blocks for them are taken. Drafts leave budget for every other row and for prompts, and pass at most one block
        boundary. In deterministic mode the drafts of an optimistic row stay in its block, because the split of the keys
        follows from their number, which is not known yet.
        """
        request, start = scheduled.request, scheduled.lease.num_planned
        if start + 1 < request.num_tokens:
            return None, ()
        spare = builder.budget - (len(self._running.requests) - builder.num_rows) - BLOCK_SIZE
        most = min(spare, self._num_left, scheduled.num_to_compute - start - 1, BLOCK_SIZE - 1)
        if start > request.num_tokens and self._cache.deterministic:
            most = min(most, BLOCK_SIZE - 1 - start % BLOCK_SIZE)
        if most <= 0:
            return None, ()
        drafts = self._drafter.draft(request, scheduled.lease, most)
        if drafts is None or not len(drafts):
            return None, ()
        masks: Sequence[IntArray] = ()
        if request.grammar is not None and request.is_constrained:
            masks = _masks_after(request.grammar, drafts.tolist())
            drafts = drafts[: len(masks)]
        if not self._cache.ensure_blocks(scheduled.lease, start + 1 + len(drafts)):
            drafts = drafts[: scheduled.lease.num_blocks * BLOCK_SIZE - start - 1]
        if not len(drafts):
            return None, ()
        self._num_left -= len(drafts)
        return drafts, masks[: len(drafts)]

    def note_plan(self, plan: StepPlan) -> None:
        """Note whether a step computes no prompts although requests wait."""
        self._is_blocked = bool(self._waiting.requests) and plan.num_decodes == len(plan.rows)

    def count_accepted(self, issued: IssuedStep, result: StepResult, seconds: float) -> None:
        """Count the accepted and the rejected drafts of a step that took `seconds`.

        The requests' counters grow, and the drafter learns how many were accepted and how long the step took.
        """
        rows, counts = issued.plan.rows, result.counts
        assert counts is not None or not rows.num_drafts.any(), f"result {result.step} says nothing of its drafts"
        if counts is not None:
            drafts = rows.num_drafts[rows.samples].tolist()
            for scheduled, num_drafts, num_accepted in zip(issued.sampled, drafts, (counts - 1).tolist(), strict=True):
                if num_drafts:
                    scheduled.request.num_draft_tokens += num_drafts
                    scheduled.request.num_accepted_tokens += num_accepted
                    self._num_drafts += 1
                    self._num_tokens += num_drafts
                    self._accepted.update(range(num_accepted))
                    self._drafter.judged(scheduled.request, num_drafts, num_accepted)
        computes_prompts = issued.plan.num_decodes < len(rows)  # prompts took a part of the time
        self._drafter.stepped(result.num_tokens, len(result.token_ids), None if computes_prompts else seconds)

    def forget(self, request: Request) -> None:
        self._drafter.forget(request)

    def stats(self) -> DraftStats:
        per_position = {str(position): count for position, count in sorted(self._accepted.items())}
        return DraftStats(self._num_drafts, self._num_tokens, sum(self._accepted.values()), per_position)


def _masks_after(grammar: Grammar, token_ids: Sequence[int]) -> list[IntArray]:
    """Return the grammar's mask after each of these ids, as bits like in TokenMasks. The grammar stays as it is.

    The list ends before the first id that is not allowed, that cannot be followed, or that makes the output whole.
    """
    follower, masks, mask = grammar.copy(), list[IntArray](), grammar.mask
    for token_id in token_ids:
        if mask is None or not mask[token_id // 32] >> token_id % 32 & 1:
            break
        try:
            follower.accept(token_id)
        except StructuredOutputError:  # reported once the output really comes to it
            break
        mask = follower.mask
        if mask is not None:
            masks.append(mask)
    return masks
