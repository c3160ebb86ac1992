"""Drafters for engines of real models."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from forkpoint.cache.lease import Lease
from forkpoint.config import BLOCK_SIZE
from forkpoint.json_options import LEAST_MATCH
from forkpoint.sched.draft_sources import CacheSource, DraftSource, NgramSource, SuffixSource
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.past_outputs import PastOutputs
from forkpoint.sched.plan import TO_DRAFT, IntArray
from forkpoint.sched.request import Request

AHEAD = 0.8  # of the times that a row could
FAR = 6  # drafts: the boundary then comes at the window's 7th token or later


class RandomDrafter(Drafter):
    """Now what the tree, past outputs, the row itself or, if it has one, the MTP layer suggest, now random ids, now
    nothing."""

    def __init__(self, seed: int, most: int, vocab_size: int, mtp: bool = False) -> None:
        self._random, self._most, self._vocab_size = random.Random(seed), most, vocab_size
        past = SuffixSource(PastOutputs(100), 2 * most + LEAST_MATCH, 2.0, 0.3)
        self._sources: list[DraftSource] = [CacheSource(), NgramSource(1, 3), past]
        self._mtp, self._ahead = mtp, random.Random(seed)
        self.num_of_past = 0  # ids drafted out of past outputs
        self.num_far_crossings = 0  # windows that pass a block boundary at an accepted token from the FAR-th on

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        if lease.num_planned >= request.num_tokens:
            return self._draft_ahead(most)
        count = min(most, self._random.randint(0, self._most))
        kind = self._random.randrange(2 + len(self._sources) + self._mtp)
        if kind < len(self._sources):
            guess = self._sources[kind].draft(request, lease, count) if count else None
            self.num_of_past += len(guess.token_ids) if guess and kind == 2 else 0
            return guess.token_ids if guess else None
        if kind == len(self._sources) and self._mtp and request.grammar is None:
            return np.full(count, TO_DRAFT, np.int32)
        return np.asarray([self._random.randrange(self._vocab_size) for _ in range(count)], np.int32)

    def plans_early(self, request: Request, lease: Lease) -> bool:
        return self._ahead.random() < AHEAD

    def _draft_ahead(self, most: int) -> IntArray:
        count = min(most, self._ahead.randint(0, self._most))
        if self._mtp and self._ahead.random() < 0.7:
            return np.full(count, TO_DRAFT, np.int32)
        return np.asarray([self._ahead.randrange(self._vocab_size) for _ in range(count)], np.int32)

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        boundary = -request.num_tokens % BLOCK_SIZE  # tokens of the window up to the next one, its first token apart
        self.num_far_crossings += FAR <= boundary <= num_accepted

    def forget(self, request: Request) -> None:
        for source in self._sources:
            source.forget(request)


class KnownDrafter(Drafter):
    """Drafts what each request is known to put out, an id of which is wrong with `1 - chance`. With `ahead` rows go
    ahead, and their drafts suppose that all drafts in flight are accepted."""

    def __init__(
        self, known: Mapping[str, Sequence[int]], most: int, chance: float, vocab_size: int, ahead: bool = False
    ) -> None:
        self._known, self._most, self._chance, self._vocab_size = known, most, chance, vocab_size
        self._random, self._ahead = random.Random(0), ahead

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        first = lease.num_planned + 1 - request.num_prompt_tokens
        right = self._known[request.id][first : first + min(most, self._random.randint(0, self._most))]
        draw, other = self._random.random, self._random.randrange
        return np.asarray([token if draw() < self._chance else other(self._vocab_size) for token in right], np.int32)

    def plans_early(self, request: Request, lease: Lease) -> bool:
        return self._ahead
