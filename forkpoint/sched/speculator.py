"""The drafter that `--speculative-config` asks for: sources, and how many of their drafts are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forkpoint.cache.lease import Lease
from forkpoint.config import SpeculativeConfig
from forkpoint.sched.draft_length import DraftLength
from forkpoint.sched.draft_sources import CacheSource, DraftSource, Guess, NgramSource, SuffixSource
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.past_outputs import PastOutputs
from forkpoint.sched.plan import TO_DRAFT, IntArray
from forkpoint.sched.request import Request

LIKELY = 0.7  # what lookups say of a step in flight is right; below, waiting costs less than drafts in the wrong place
NONE = np.empty(0, np.int32)


class Speculator(Drafter):
    """Asks its sources; the one where the most tokens agree with what the row has come to is taken at its word. Where
    they know nothing, the model's MTP layer guesses if it is `by_model`: the runner asks it."""

    def __init__(self, sources: Sequence[DraftSource], most: int, by_model: bool = False) -> None:
        self._sources, self._most, self._by_model = tuple(sources), most, by_model
        self._length = DraftLength()
        self._given: dict[str, IntArray] = {}  # to each request's last step

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Speculator:
        """The tree knows whole histories, past outputs any part of them, the row itself its last tokens; the model
        guesses where all of them know nothing."""
        sources: list[DraftSource] = [] if config.method == "ngram" else [CacheSource()]
        if config.method == "suffix":
            depth, past = config.suffix_decoding_max_tree_depth, PastOutputs(config.suffix_decoding_max_cached_requests)
            factor, share = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
            sources.append(SuffixSource(past, depth, factor, share))
        sources.append(NgramSource(*config.lookup_range))
        return cls(sources, config.num_speculative_tokens, config.method == "mtp")

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        """What lookups find, else the model's own. A grammar must know drafts beforehand: it gets none of those."""
        count = self._length.choose(request.id, min(most, self._most))
        drafts = self._following(request, lease, count) if count else None
        if count and self._by_model and request.grammar is None and (drafts is None or not len(drafts)):
            drafts = np.full(count, TO_DRAFT, np.int32)
        self._given[request.id] = NONE if drafts is None else drafts
        return drafts

    def plans_early(self, request: Request, lease: Lease) -> bool:
        """Where drafts do not pay, the model has some, nothing that is known matches, or what matches says what follows
        the step in flight and is likely right in what it says of that step."""
        if self._by_model or not self._length.tries(request.id):
            return True
        following = self._following(request, lease, 1)
        return following is None or bool(len(following))

    def _following(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        """Up to `most` ids that follow what is known and what a step in flight confirms, as far as lookups know that:
        those of its drafts that they say too, and one more. Empty: it is not likely that they are right there, or that
        is all they know. None: they know nothing."""
        in_flight = lease.num_planned + 1 - request.num_tokens
        guess = _best(self._sources, request, lease, in_flight + most)
        if guess is None or not in_flight:
            return guess.token_ids if guess else None
        ids, given = guess.token_ids, self._given.get(request.id, NONE)[: min(in_flight - 1, len(guess.token_ids))]
        agree = (given == ids[: len(given)]) | (given == TO_DRAFT)
        num_confirmed = int(agree.cumprod().sum()) + 1
        return ids[num_confirmed:][:most] if self._length.likely(request.id, num_confirmed) >= LIKELY else NONE

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._length.judged(request.id, num_drafts, num_accepted)

    def stepped(self, num_tokens: int, num_confirmed: int, elapsed_s: float | None) -> None:
        self._length.stepped(num_tokens, num_confirmed, elapsed_s)

    def forget(self, request: Request) -> None:
        for source in self._sources:
            source.forget(request)
        self._length.forget(request.id)
        self._given.pop(request.id, None)


def _best(sources: Sequence[DraftSource], request: Request, lease: Lease, most: int) -> Guess | None:
    """Of the source where the most tokens agree."""
    best: Guess | None = None
    for source in sources:
        if best is None or best.num_matched < source.most_matched:
            guess = source.draft(request, lease, most)
            best = guess if guess and (best is None or best.num_matched < guess.num_matched) else best
    return best
