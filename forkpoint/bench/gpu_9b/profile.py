"""Profiles of the kinds of step that the protocol is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from forkpoint.bench.gpu_9b.measures import Ids, Sizes
from forkpoint.bench.step_profile import Profile, profile_steps
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams

NUM_STEPS = 16


class Profiler:
    """Drives an LLM's engine step by step."""

    def __init__(self, llm: LLM, ids: Callable[[int], Ids], sizes: Sizes) -> None:
        self._llm, self._engine, self._ids, self._sizes = llm, llm._engine, ids, sizes

    def run(self) -> Iterator[Profile]:
        """Decode steps of every batch size, then a warm and a cold prompt."""
        for batch in self._sizes.decode_batches:
            yield self._decode(batch)
        prompt = self._ids(self._sizes.prompt)
        yield self._prefill("cold prompt", lambda: self._ids(self._sizes.prompt), NUM_STEPS // 4)
        self._ask(prompt)
        yield self._prefill("warm prompt", lambda: prompt + self._ids(self._sizes.extension), NUM_STEPS)

    def _add(self, prompt: Ids, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(self._engine.inputs.prompt(prompt), params)

    def _ask(self, prompt: Ids) -> None:
        self._add(prompt, 1)
        while self._engine.has_unfinished():
            self._engine.advance()

    def _decode(self, batch: int) -> Profile:
        for _ in range(batch):
            self._add(self._ids(self._sizes.decode_prompt), 4 * NUM_STEPS + 64)
        for _ in range(8 + batch * self._sizes.decode_prompt // 1024):
            self._engine.advance()
        profile = profile_steps(self._llm, f"decode, {batch} rows", self._engine.advance, NUM_STEPS)
        self._engine.abort_all()
        return profile

    def _prefill(self, name: str, prompt: Callable[[], Ids], repeats: int) -> Profile:
        def step() -> None:
            self._ask(prompt())

        step()
        return profile_steps(self._llm, name, step, repeats)
