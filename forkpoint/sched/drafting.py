"""Drafts in plans: how many a row gets, what its grammar allows of them, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from forkpoint.cache.manager import CacheManager
from forkpoint.errors import StructuredOutputError
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.entry import Entry, IssuedStep
from forkpoint.sched.plan import IntArray, StepResult
from forkpoint.sched.request import Grammar, Request
from forkpoint.sched.stats import DraftStats


class DraftPlanner:
    """Asks the drafter for rows that decode."""

    def __init__(self, drafter: Drafter, cache: CacheManager, clock: Callable[[], float]) -> None:
        self._drafter, self._cache, self._clock = drafter, cache, clock
        self._num_drafts = self._num_tokens = 0
        self._accepted: Counter[int] = Counter()  # by position

    def plan(self, builder: PlanBuilder, entry: Entry, num_running: int) -> tuple[IntArray | None, Sequence[IntArray]]:
        """Guesses of what follows the row's newest token, for which there are blocks, and what its grammar allows
        after each; None: none. They leave budget for every other row and for a chunk of a prompt, and do not come as
        far as the block after the next."""
        request, start, layout = entry.request, entry.lease.num_planned, self._cache.layout
        if start + 1 != request.num_tokens:
            return None, ()
        spare = builder.budget - num_running - layout.checkpoint_grid
        most = min(spare, entry.last - start - 1, layout.block_size - 1)
        drafts = self._drafter.draft(request, entry.lease, most) if most > 0 else None
        if drafts is None or not len(drafts):
            return None, ()
        masks: Sequence[IntArray] = ()
        if request.grammar is not None:
            masks = _masks_after(request.grammar, drafts.tolist())
            drafts = drafts[: len(masks)]
        if not self._cache.ensure_blocks(entry.lease, start + 1 + len(drafts)):
            drafts = drafts[: entry.lease.num_blocks * layout.block_size - start - 1]
        return (drafts, masks[: len(drafts)]) if len(drafts) else (None, ())

    def begin(self, issued: IssuedStep) -> None:
        """A step has been planned."""
        issued.started_s = self._clock()

    def settle(self, issued: IssuedStep, result: StepResult) -> None:
        """The result of a step is known: count what was accepted of its drafts, and how long it took."""
        counts = result.counts.tolist() if result.counts is not None else []
        for index, num_drafts in issued.drafting:
            num_accepted = counts[index] - 1
            request = issued.sampled[index].request
            request.num_draft_tokens += num_drafts
            request.num_accepted_tokens += num_accepted
            self._num_drafts += 1
            self._num_tokens += num_drafts
            self._accepted.update(range(num_accepted))
            self._drafter.judged(request, num_drafts, num_accepted)
        if issued.decodes_only:
            self._drafter.stepped(result.num_tokens, len(result.token_ids), self._clock() - issued.started_s)

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
