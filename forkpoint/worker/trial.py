"""Made-up requests before the first real one: what graphs do not serve is compiled, a full step's memory measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import CacheConfig, SchedulerConfig
from forkpoint.params import SamplingParams
from forkpoint.runtime.runner import Loaded, ModelRunner
from forkpoint.sched.request import Request
from forkpoint.sched.scheduler import Scheduler

BESIDE, BESIDE_OUTPUTS = 16, 64  # tokens of a prompt whose row decodes beside those of others, and its outputs
# Ways of sampling with kernels of their own.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logit_bias": {0: 1.0}, "prompt_logprobs": 1},
)


def run_full_step(loaded: Loaded) -> None:
    """One step of `max_num_batched_tokens` prompt tokens, with an arena of its own that is given back."""
    prompts = _full_step(loaded.sched, loaded.model.config.max_model_len)
    runner, planner = _parts(loaded, prompts)
    for number, length in enumerate(prompts):
        planner.add(_request(length, 1, number))
    plan = planner.schedule()
    assert plan is not None
    runner.submit(plan).result()
    runner.close()


def compile_ahead(loaded: Loaded, most_pages: int | None = None) -> None:
    """Run prompts longer than what graphs serve, from two full steps down, or what `most_pages` hold, each sampled in
    another way and beside a row that decodes: no request has to wait for a compiler then."""
    budget, limit = loaded.sched.max_num_batched_tokens, loaded.model.config.max_model_len
    if limit < 3:
        return
    lengths, largest = [min(2 * budget, limit - 2)], max(shape.num_tokens for shape in loaded.shapes)
    while lengths[0] > 1 and most_pages and _pages(loaded.layout, (BESIDE + BESIDE_OUTPUTS, lengths[0])) > most_pages:
        lengths[0] //= 2
    while lengths[-1] // 2 > largest or len(lengths) < len(SAMPLINGS):
        lengths.append(max(1, lengths[-1] // 2 - 1))  # odd ones too: kernels look at what 16 divides
    runner, planner = _parts(loaded, (BESIDE + BESIDE_OUTPUTS, lengths[0]))
    if limit > BESIDE + BESIDE_OUTPUTS:
        planner.add(_request(BESIDE, BESIDE_OUTPUTS))
    for number, length in enumerate(lengths):
        request = _request(length, 2, number, **SAMPLINGS[number % len(SAMPLINGS)])
        planner.add(request)
        while len(request.output_token_ids) < 2 and (plan := planner.schedule()) is not None:
            planner.apply(runner.submit(plan).result())
    runner.close()


def full_step_pages(layout: CacheLayout, sched: SchedulerConfig, max_model_len: int) -> int:
    """Pages that a full step's prompts take, a spare block for each beside each, and the reserved one."""
    return _pages(layout, _full_step(sched, max_model_len))


def _pages(layout: CacheLayout, prompts: Sequence[int]) -> int:
    spare = layout.block_size * len(prompts)
    return 1 + sum(layout.num_pages_for(length + 1 + spare, 1) for length in prompts)


def _full_step(sched: SchedulerConfig, max_model_len: int) -> list[int]:
    """Lengths of as few prompts as make up a full step."""
    longest = max(1, min(sched.max_num_batched_tokens, max_model_len - 1))
    count = min(sched.max_num_seqs, -(-sched.max_num_batched_tokens // longest))
    return [min(longest, sched.max_num_batched_tokens - i * longest) for i in range(count)]


def _parts(loaded: Loaded, prompts: Sequence[int]) -> tuple[ModelRunner, Scheduler]:
    """For prompts that are there at the same time."""
    num_pages, limit = _pages(loaded.layout, prompts), loaded.model.config.max_model_len
    cache = CacheConfig(enable_prefix_caching=False)
    runner = ModelRunner(loaded, num_pages, num_rows=len(prompts), shapes=())
    return runner, Scheduler(loaded.layout, num_pages, cache, loaded.sched, max_model_len=limit)


def _request(length: int, max_tokens: int, number: int = -1, **params: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **params})
    return Request(f"made-up-{length}-{number}", np.zeros(length, np.int32), sampling, max_tokens, seed=0)
