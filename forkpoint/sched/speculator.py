"""The drafter of `--speculative-config`: it picks a source, and how many of its drafts a row gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forkpoint.cache.lease import Lease
from forkpoint.json_options import SpeculativeConfig
from forkpoint.sched.draft_length import DraftLength
from forkpoint.sched.draft_sources import CacheSource, DraftSource, Guess, NgramSource, SuffixSource
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.past_outputs import PastOutputs
from forkpoint.sched.plan import TO_DRAFT, IntArray
from forkpoint.sched.request import Request

# Drafts of an early row need this probability that lookups are right about the step in flight. Below it, waiting for
# the result costs less than drafts at the wrong position.
LIKELY = 0.7
NONE = np.empty(0, np.int32)


class Speculator(Drafter):
    """Takes the drafts of the source with the longest match.

    If no source matches, and `by_model` is set, the runner lets the model's MTP layer guess.
    """

    def __init__(self, sources: Sequence[DraftSource], most: int, by_model: bool = False) -> None:
        """A row gets at most `most` drafts in a step."""
        self._sources, self._most, self._by_model = tuple(sources), most, by_model
        self._length = DraftLength()
        self._given: dict[str, IntArray] = {}  # drafts of each request's last step

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Speculator:
        """Return the drafter that the options name."""
        sources: list[DraftSource] = [] if config.method == "ngram" else [CacheSource()]
        if config.method == "suffix":
            depth, past = config.suffix_decoding_max_tree_depth, PastOutputs(config.suffix_decoding_max_cached_requests)
            factor, share = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
            sources.append(SuffixSource(past, depth, factor, share))
        sources.append(NgramSource(*config.lookup_range))
        return cls(sources, config.num_speculative_tokens, config.method == "mtp")

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        """Return what lookups find, or else `TO_DRAFT` with a model that guesses; None or empty: no drafts.

        Under a grammar, which has to see the drafts' ids, the model does not guess.
        """
        count = self._length.choose(request.id, min(most, self._most))
        drafts: IntArray | None = None
        if count:
            drafts = self._following(request, lease, count)
        if count and self._by_model and not request.is_constrained and (drafts is None or not len(drafts)):
            drafts = np.full(count, TO_DRAFT, np.int32)
        self._given[request.id] = NONE if drafts is None else drafts
        return drafts

    def plans_early(self, request: Request, lease: Lease) -> bool:
        """Return whether planning early costs no drafts.

        It costs none if drafts do not pay, if the model guesses them, or if no source matches. It also costs none if
        the match reaches past the step in flight and is likely right about that step.
        """
        if self._by_model or not self._length.tries(request.id):
            return True
        following = self._following(request, lease, 1)
        return following is None or bool(len(following))

    def _following(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        """Return up to `most` ids that follow the request's tokens and those that its step in flight confirms.

        The step is taken to confirm the drafts that agree with the guess of the best source, and one more token. The
        result is empty if the guess is not likely right about the step, or does not reach past it. None: no source
        matches.
        """
        in_flight = lease.num_planned + 1 - request.num_tokens
        guess = _best(self._sources, request, lease, in_flight + most)
        if guess is None:
            return None
        if not in_flight:
            return guess.token_ids
        ids, given = guess.token_ids, self._given.get(request.id, NONE)[: min(in_flight - 1, len(guess.token_ids))]
        agree = (given == ids[: len(given)]) | (given == TO_DRAFT)
        num_confirmed = int(agree.cumprod().sum()) + 1
        if self._length.likely(request.id, num_confirmed) < LIKELY:
            return NONE
        return ids[num_confirmed:][:most]

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
    """Return the guess of 1 to `most` ids with the longest match; of equal ones the first source's. None: no match."""
    best: Guess | None = None
    for source in sources:
        if best is None or best.num_matched < source.most_matched:
            guess = source.draft(request, lease, most)
            if guess is not None and (best is None or best.num_matched < guess.num_matched):
                best = guess
    return best
