"""A drafter whose guesses are right as often as a test wants."""

from __future__ import annotations

import random

import numpy as np

from forkpoint.cache.lease import Lease
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import TO_DRAFT, IntArray
from forkpoint.sched.request import Request
from tests.hash_grammar import HashGrammar
from tests.hash_runner import HashRunner

AHEAD = 0.95


class HashDrafter(Drafter):
    """Up to `most` drafts for a row at a time, each right with `chance`; what follows a wrong one is right again. Most
    rows go ahead, with drafts that the runner makes or that suppose those in flight to be right."""

    def __init__(self, runner: HashRunner, most: int, chance: float, seed: int = 0) -> None:
        self._runner, self._most, self._chance = runner, most, chance
        self._random = random.Random(seed)
        self._outputs: dict[str, list[int]] = {}

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        if lease.num_planned >= request.num_tokens:
            return self._draft_ahead(request, lease, most)
        outputs = self._outputs.get(request.id)
        if outputs is None:
            grammar = request.grammar
            fresh = HashGrammar(self._runner.vocab_size, grammar.length) if isinstance(grammar, HashGrammar) else None
            prompt = request.prompt_token_ids.tolist()
            outputs = self._runner.expected(prompt, request.max_tokens, grammar=fresh, images=request.images)
            self._outputs[request.id] = outputs
        return self._some(outputs[len(request.output_token_ids) :], most)

    def _some(self, outputs: list[int], most: int) -> IntArray | None:
        count = min(most, self._random.randint(0, self._most))
        drafts = [
            token if self._random.random() < self._chance else (token + 1) % self._runner.vocab_size
            for token in outputs[:count]
        ]
        return np.asarray(drafts, np.int32) if drafts else None

    def plans_early(self, request: Request, lease: Lease) -> bool:
        return self._random.random() < AHEAD

    def _draft_ahead(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        if self._random.random() < 0.5:
            return np.full(min(most, self._random.randint(0, self._most)), TO_DRAFT, np.int32)
        num_sampled = lease.num_planned + 1 - request.num_prompt_tokens  # if all in flight are right
        return self._some(self._outputs.get(request.id, [])[num_sampled:], most)
