"""The drafter that `--speculative-config` asks for: sources, and how many of their drafts are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forkpoint.cache.lease import Lease
from forkpoint.config import SpeculativeConfig
from forkpoint.sched.draft_length import DraftLength
from forkpoint.sched.draft_sources import CacheSource, DraftSource, Guess, ModelSource, NgramSource, SuffixSource
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.past_outputs import PastOutputs
from forkpoint.sched.plan import TO_DRAFT, IntArray
from forkpoint.sched.request import Request


class Speculator(Drafter):
    """Asks its sources; the one where the most tokens agree with what the row has come to is taken at its word."""

    def __init__(self, sources: Sequence[DraftSource], most: int) -> None:
        self._sources, self._most = tuple(sources), most
        self._by_model = any(isinstance(source, ModelSource) for source in sources)
        self._length = DraftLength()

    @classmethod
    def of(cls, config: SpeculativeConfig, block_size: int) -> Speculator:
        """The tree knows whole histories, past outputs any part of them, the row itself its last tokens; the model
        guesses where all of them know nothing."""
        sources: list[DraftSource] = [] if config.method == "ngram" else [CacheSource(block_size)]
        if config.method == "suffix":
            depth, past = config.suffix_decoding_max_tree_depth, PastOutputs(config.suffix_decoding_max_cached_requests)
            factor, share = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
            sources.append(SuffixSource(past, depth, factor, share))
        sources.append(NgramSource(*config.lookup_range))
        if config.method == "mtp":
            sources.append(ModelSource())
        return cls(sources, config.num_speculative_tokens)

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        count = self._length.choose(request.id, min(most, self._most))
        if not count:
            return None
        best: Guess | None = None
        for source in self._sources:
            if best is None or best.num_matched < source.most_matched:
                guess = source.draft(request, lease, count)
                best = guess if guess and (best is None or best.num_matched < guess.num_matched) else best
        return best.token_ids if best else None

    def goes_ahead(self, request: Request, lease: Lease) -> bool:
        """Where drafts do not pay, or nothing but the model has any, judged by what is known."""
        if not self._length.tries(request.id):
            return True
        lookups = [source for source in self._sources if not isinstance(source, ModelSource)]
        return all(source.draft(request, lease, 1) is None for source in lookups)

    def draft_ahead(self, request: Request, most: int) -> IntArray | None:
        if not self._by_model:
            return None
        count = self._length.choose(request.id, min(most, self._most))
        return np.full(count, TO_DRAFT, np.int32) if count else None

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._length.judged(request.id, num_drafts, num_accepted)

    def stepped(self, num_tokens: int, num_confirmed: int, elapsed_s: float | None) -> None:
        self._length.stepped(num_tokens, num_confirmed, elapsed_s)

    def forget(self, request: Request) -> None:
        for source in self._sources:
            source.forget(request)
        self._length.forget(request.id)
