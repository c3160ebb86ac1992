"""The engine under test, its answers and its own counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

import numpy as np

from evaluation.forced import ForcedTokens
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.manager import CacheManager
from forkpoint.engine.core import EngineCore
from forkpoint.engine.inputs import InputProcessor, Prompt
from forkpoint.engine.llm import LLM
from forkpoint.errors import RequestFailedError
from forkpoint.outputs import CompletionOutput, RequestOutput
from forkpoint.params import SamplingParams
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Reply:
    """One greedy completion. `logprobs` has one entry for each of its tokens. The last two fields belong to the whole
    request."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Counters:
    """The engine's own counters. A request that resumes counts its queried and cached tokens again."""

    num_asked_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_hits: int = 0  # of checkpoints
    num_preemptions: int = 0
    num_checkpoints_evicted: int = 0
    num_blocks_evicted: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of those

    def since(self, earlier: Counters) -> Counters:
        """Return the counts added since `earlier` was read."""
        return Counters(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def plus(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Subject:
    """An engine that users get from `LLM`, with access to its parts. Close it, or use it in a `with` statement."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.llm = LLM(model, **options)
        self._num_forced = 0

    @property
    def core(self) -> EngineCore:
        return self.llm._engine.core

    @property
    def inputs(self) -> InputProcessor:
        return self.llm._engine.inputs

    @property
    def scheduler(self) -> Scheduler:
        scheduler = self.core.scheduler
        assert isinstance(scheduler, Scheduler)
        return scheduler

    @property
    def cache(self) -> CacheManager:
        return self.scheduler.cache

    @property
    def layout(self) -> CacheLayout:
        return self.scheduler.layout

    @property
    def arena(self) -> ArenaBuffer:
        """The bytes of blocks and slots."""
        arena = getattr(self.core._runner, "arena", None)
        assert isinstance(arena, ArenaBuffer)
        return arena

    def counters(self) -> Counters:
        """The current counters."""
        metrics = self.llm.get_metrics()
        return Counters(
            num_asked_tokens=metrics["query_tokens"],
            num_cached_tokens=metrics["hit_tokens"],
            num_computed_tokens=metrics["num_model_tokens"],
            num_hits=sum(metrics["checkpoint_hits"].values()),
            num_preemptions=metrics["num_preemptions"],
            num_checkpoints_evicted=sum(metrics["checkpoints_evicted"].values()),
            num_blocks_evicted=metrics["blocks_evicted"],
            num_draft_tokens=metrics["num_draft_tokens"],
            num_accepted_tokens=metrics["num_accepted_tokens"],
        )

    def ask(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        n: int = 1,
        salts: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[list[Reply]]:
        """Return the `n` greedy completions of each prompt, all submitted together. `salts` has one for each prompt, or
        is None.

        With `ignore_eos` they have `max_tokens` tokens, also after the end of the answer. Raises RequestFailedError for
        a completion that failed.
        """
        params = [
            SamplingParams(
                n=n, temperature=0.0, max_tokens=max_tokens, logprobs=0, cache_salt=salt, ignore_eos=ignore_eos
            )
            for salt in salts or [""] * len(prompts)
        ]
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [[_reply(output, completion) for completion in output.outputs] for output in outputs]

    def log_probabilities(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], salts: Sequence[str]
    ) -> list[float]:
        """Return the log-probabilities (nats) of each answer's tokens after its prompt. All are submitted together.

        The tokens are processed like sampled ones, including the prefix cache, because a grammar leaves no other
        choice. Raises RequestFailedError.
        """
        totals: dict[str, float] = {}
        for prompt, answer, salt in zip(prompts, answers, salts, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=len(answer), logprobs=0, cache_salt=salt)
            name = f"forced-{self._num_forced}"
            self._num_forced += 1
            (request,) = self.inputs.requests(name, prompt, params, priority=0, number=0, arrival_s=0.0)
            request.grammar = ForcedTokens(np.asarray(answer, np.int32), self.inputs.vocab_size)
            totals[name] = 0.0
            self.core.add(request)
        while self.core.has_unfinished():
            for update in self.core.step():
                if update.error is not None:
                    raise RequestFailedError(f"an answer could not be scored: {update.error}") from update.error
                assert update.logprobs is not None
                totals[update.request.id] += update.logprobs.logprob
        return list(totals.values())

    def close(self) -> None:
        self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reply(output: RequestOutput, completion: CompletionOutput) -> Reply:
    if completion.error is not None or completion.logprobs is None:
        raise RequestFailedError(f"a question was not answered: {completion.error}")
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return Reply(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(entry[token].logprob for token, entry in pairs),
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=output.num_preemptions,
    )
