"""Drafts in plans: how many a row gets, what its grammar allows of them, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from forkpoint.cache.manager import CacheManager
from forkpoint.config import BLOCK_SIZE
from forkpoint.errors import StructuredOutputError
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import IntArray, StepResult
from forkpoint.sched.request import Grammar, Request
from forkpoint.sched.scheduled_request import IssuedStep, ScheduledRequest
from forkpoint.sched.stats import DraftStats

MOST_HELD = 1 / 4  # of the rows that decode, if the others are to go ahead


class DraftPlanner:
    """Asks the drafter for rows that decode."""

    def __init__(self, drafter: Drafter, cache: CacheManager, clock: Callable[[], float]) -> None:
        self._drafter, self._cache, self._clock = drafter, cache, clock
        self._num_drafts = self._num_tokens = 0
        self._accepted: Counter[int] = Counter()  # by position
        self._last_result_s = 0.0  # when the last result was known

    def early_rows(self, running: Iterable[ScheduledRequest]) -> set[ScheduledRequest] | None:
        """The rows that can be planned before the result of their step in flight is known; None: too many cannot, or
        would have better drafts later, and all are better planned together once it is."""
        decoding = [
            scheduled
            for scheduled in running
            if scheduled.prefill_end <= scheduled.lease.num_planned < scheduled.num_to_compute
        ]
        found, may_be_held = set[ScheduledRequest](), int(MOST_HELD * len(decoding))
        for scheduled in decoding:
            if scheduled.lease.num_planned < scheduled.request.num_tokens:
                continue
            can = self._may_plan_early(scheduled)
            if can:
                found.add(scheduled)
            if not can or not self._drafter.plans_early(scheduled.request, scheduled.lease):
                may_be_held -= 1
            if may_be_held < 0:
                return None
        return found

    def _may_plan_early(self, scheduled: ScheduledRequest) -> bool:
        """Where drafts are in flight it is not known where the row's next step starts. What is sampled must not depend
        on that; in deterministic mode all of them are in one block."""
        request, end = scheduled.request, scheduled.lease.num_planned
        if request.grammar is not None:
            return False
        if end > request.num_tokens:
            placed = request.params.min_tokens > len(request.output_token_ids)
            crosses = self._cache.deterministic and (request.num_tokens - 1) // BLOCK_SIZE != end // BLOCK_SIZE
            return not (placed or crosses)
        return True

    def plan(
        self, builder: PlanBuilder, scheduled: ScheduledRequest, num_running: int
    ) -> tuple[IntArray | None, Sequence[IntArray]]:
        """Guesses of what follows the row's newest token, for which there are blocks, and what its grammar allows
        after each; None: none. They leave budget for every other row and for a chunk of a prompt, and do not come as
        far as the block after the next. What is planned ahead in deterministic mode stays in its block: how keys are
        split follows from their number, and that is not known."""
        request, start = scheduled.request, scheduled.lease.num_planned
        if start + 1 < request.num_tokens:
            return None, ()
        spare = builder.budget - (num_running - builder.num_rows) - BLOCK_SIZE
        most = min(spare, scheduled.num_to_compute - start - 1, BLOCK_SIZE - 1)
        if start > request.num_tokens and self._cache.deterministic:
            most = min(most, BLOCK_SIZE - 1 - start % BLOCK_SIZE)
        if most <= 0:
            return None, ()
        drafts = self._drafter.draft(request, scheduled.lease, most)
        if drafts is None or not len(drafts):
            return None, ()
        masks: Sequence[IntArray] = ()
        if request.grammar is not None:
            masks = _masks_after(request.grammar, drafts.tolist())
            drafts = drafts[: len(masks)]
        if not self._cache.ensure_blocks(scheduled.lease, start + 1 + len(drafts)):
            drafts = drafts[: scheduled.lease.num_blocks * BLOCK_SIZE - start - 1]
        return (drafts, masks[: len(drafts)]) if len(drafts) else (None, ())

    def begin(self, issued: IssuedStep) -> None:
        """A step has been planned."""
        issued.started_s = self._clock()

    def count_accepted(self, issued: IssuedStep, result: StepResult) -> None:
        """The result of a step is known: count what was accepted of its drafts, and how long it took."""
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
        now, began_s = (
            self._clock(),
            max(issued.started_s, self._last_result_s),
        )  # it may have waited for the one before
        elapsed_s = now - began_s if issued.plan.num_decodes == len(rows) else None
        self._drafter.stepped(result.num_tokens, len(result.token_ids), elapsed_s)
        self._last_result_s = now

    def forget(self, request: Request) -> None:
        self._drafter.forget(request)

    def stats(self) -> DraftStats:
        per_position = {str(position): count for position, count in sorted(self._accepted.items())}
        return DraftStats(self._num_drafts, self._num_tokens, sum(self._accepted.values()), per_position)


def _masks_after(grammar: Grammar, token_ids: Sequence[int]) -> list[IntArray]:
    """What may come after each of these ids, up to the first that may not come itself, makes the output whole or
    cannot be followed."""
    ahead, masks, mask = grammar.copy(), list[IntArray](), grammar.mask
    for token_id in token_ids:
        if mask is None or not mask[token_id // 32] >> token_id % 32 & 1:
            break
        try:
            ahead.accept(token_id)
        except StructuredOutputError:  # it is told of, or not, once the output has come to it
            break
        mask = ahead.mask
        if mask is not None:
            masks.append(mask)
    return masks
