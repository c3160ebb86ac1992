"""Profiles of the kinds of step that the protocol is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.gpu_9b.measures import Ids, Sizes
from benchmarks.step_profile import Profile, profile_steps
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams

NUM_STEPS = 16


class Profiler:
    """Drives an LLM's engine step by step."""

    def __init__(self, llm: LLM, ids: Callable[[int], Ids], sizes: Sizes) -> None:
        self._llm, self._engine, self._ids, self._sizes = llm, llm._engine, ids, sizes

    def run(self) -> Iterator[Profile]:
        """Profile decode steps of all batch sizes and within the agent loop, a cold and a warm prompt, and a chat
        turn."""
        sizes = self._sizes
        for batch in sizes.decode_batches:
            yield self.one(str(batch))
        middle = sizes.shared + sizes.own + sizes.turns // 2 * (sizes.turn_new + sizes.turn_answer)
        yield self._decode(sizes.conversations, middle)
        yield self.one("cold")
        yield self.one("warm")
        yield self._warm("chat turn", (sizes.chat_start + sizes.chat_end) // 2, sizes.chat_new)

    def one(self, name: str) -> Profile:
        """Profile `cold` or `warm` prompts, or as many decoding rows as `name` says."""
        if name == "cold":
            return self._prefill("cold prompt", lambda: self._ids(self._sizes.prompt), NUM_STEPS // 4)
        if name == "warm":
            return self._warm("warm prompt", self._sizes.prompt, self._sizes.extension)
        return self._decode(int(name), self._sizes.decode_prompt)

    def _warm(self, name: str, start: int, extension: int) -> Profile:
        prompt = self._ids(start)
        self._ask(prompt)
        return self._prefill(name, lambda: prompt + self._ids(extension), NUM_STEPS)

    def _add(self, prompt: Ids, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(self._engine.inputs.prompt(prompt), params)

    def _ask(self, prompt: Ids) -> None:
        self._add(prompt, 1)
        while self._engine.has_unfinished():
            self._engine.advance()

    def _decode(self, batch: int, prompt_len: int) -> Profile:
        num_steps = 8 + batch * prompt_len // 2048
        for _ in range(batch):
            self._add(self._ids(prompt_len), num_steps + 2 * NUM_STEPS + 8)
        for _ in range(num_steps):
            self._engine.advance()
        name = f"decode, {batch} rows of {prompt_len:,} tokens"
        profile = profile_steps(self._llm, name, self._engine.advance, NUM_STEPS)
        while self._engine.has_unfinished():
            self._engine.advance()
        return profile

    def _prefill(self, name: str, prompt: Callable[[], Ids], repeats: int) -> Profile:
        def step() -> None:
            self._ask(prompt())

        step()
        return profile_steps(self._llm, name, step, repeats)
