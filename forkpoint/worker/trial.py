"""Warm-up with made-up requests: compiles what graphs do not serve, and measures the memory of a full step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE, CacheConfig, SchedulerConfig
from forkpoint.models.vision import VisionTower
from forkpoint.params import SamplingParams
from forkpoint.platforms.table import traits_of
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.runner import ModelRunner
from forkpoint.sched.plan import TokenMasks
from forkpoint.sched.request import Request
from forkpoint.sched.scheduler import Scheduler

BESIDE, BESIDE_OUTPUTS = 16, 64  # prompt and output tokens of a request that decodes next to the others
SHORT = 64  # tokens up to which kernels change more often than at powers of two
# Sampling parameters that need kernels of their own. The last one is also used with masks.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logit_bias": {0: 1.0}, "prompt_logprobs": 1},
)


def run_full_step(loaded: Loaded, most_pages: int | None = None) -> None:
    """Run one step of `max_num_batched_tokens` prompt tokens, or of as many whole prompts as `most_pages` hold.

    The arena is its own and is freed afterwards."""
    prompts = full_step(loaded.sched, loaded.model.config.max_model_len)
    while prompts and most_pages and _pages(loaded.layout, prompts) > most_pages:
        prompts.pop()
    if not prompts:
        return
    runner, planner = _parts(loaded, prompts)
    for number, length in enumerate(prompts):
        planner.add(_request(length, 1, number))
    plan = planner.schedule()
    assert plan is not None
    runner.submit(plan).result()
    runner.close()


def encode_largest_image(tower: VisionTower) -> None:
    """Encode a black image of about as many tokens as an image may have."""
    settings = tower.config.settings
    num_rows = math.isqrt(settings.max_tokens)
    height, width = num_rows * settings.token_side, settings.max_tokens // num_rows * settings.token_side
    tower(torch.zeros((height, width, 3), dtype=getattr(torch, settings.pixel_type)))


def try_kernels(loaded: Loaded, most_pages: int | None = None) -> None:
    """Run steps that graphs do not serve, so that no request has to wait for a compiler. The arena is their own.

    Runs prompts of ever fewer tokens next to a row that decodes, with each way of sampling. The first prompt makes a
    full step, or what `most_pages` hold. Without `most_pages` it makes half a step, because `run_full_step` comes
    later.
    """
    config = loaded.model.config
    if config.max_model_len < 3:
        return
    longest = max(1, min(loaded.sched.max_num_batched_tokens, config.max_model_len - 2) // (1 if most_pages else 2))
    while longest > 1 and most_pages and _pages(loaded.layout, (BESIDE + BESIDE_OUTPUTS, longest)) > most_pages:
        longest //= 2
    lengths = trial_lengths(longest, traits_of(loaded.platform.device).most_overlapped_rows)
    runner, planner = _parts(loaded, (BESIDE + BESIDE_OUTPUTS, longest))
    if config.max_model_len > BESIDE + BESIDE_OUTPUTS:
        planner.add(_request(BESIDE, BESIDE_OUTPUTS))
    every_id = TokenMasks(np.zeros(1, np.int32), np.full((1, -(-config.vocab_size // 32)), -1, np.int32))
    for number, length in enumerate(lengths):
        masks = None if number < len(SAMPLINGS) - 1 else every_id
        request = _request(length, 1, number, **SAMPLINGS[min(number, len(SAMPLINGS) - 1)])
        planner.add(request)
        while not request.output_token_ids and (plan := planner.schedule()) is not None:
            known = replace(plan.rows, tokens=np.maximum(plan.rows.tokens, 0))  # without ids that kernels fill in
            result = runner.submit(replace(plan, rows=known, masks=masks)).result()
            # Kernels that are only compiled sample nothing, and random weights may give logits that are not finite.
            planner.apply(replace(result, token_ids=np.zeros_like(result.token_ids), failed_rows=()))
    runner.close()


def trial_lengths(longest: int, most_overlapped: int) -> list[int]:
    """Return the lengths of prompts that need all forms of kernels, with a row that decodes in the same step.

    Short prompts are among them, because graphs serve none that want prompt log-probabilities. Odd lengths are needed,
    because kernels have other forms for multiples of 16."""
    lengths = [longest]
    while lengths[-1] > 2 or len(lengths) < len(SAMPLINGS):
        last = lengths[-1]
        length = max(1, last // 2 - 1 if last > SHORT else last * 3 // 4 - 1)
        # Kernels for many tokens overlap only in steps of nearly `most_overlapped` rows.
        lengths.append(most_overlapped - 1 if length < most_overlapped <= last else length)
    return lengths


def try_graphs(loaded: Loaded) -> None:
    """Issue the work of all graphs on padding."""
    runner = ModelRunner(loaded, 1 + loaded.layout.num_pages_for(BLOCK_SIZE, 1))
    runner.issue_all()
    runner.platform.synchronize()
    runner.close()


def full_step_pages(layout: CacheLayout, sched: SchedulerConfig, max_model_len: int) -> int:
    """Return the pages of a full step's prompts, with spare blocks, and the reserved page."""
    return _pages(layout, full_step(sched, max_model_len))


def _pages(layout: CacheLayout, prompts: Sequence[int]) -> int:
    spare = BLOCK_SIZE * len(prompts)
    return 1 + sum(layout.num_pages_for(length + 1 + spare, 1) for length in prompts)


def full_step(sched: SchedulerConfig, max_model_len: int) -> list[int]:
    """Return the lengths of as few prompts as make up a full step, or as the rows allow."""
    longest = max(1, min(sched.max_num_batched_tokens, max_model_len - 1))
    count = min(sched.max_num_seqs, -(-sched.max_num_batched_tokens // longest))
    return [min(longest, sched.max_num_batched_tokens - i * longest) for i in range(count)]


def _parts(loaded: Loaded, prompts: Sequence[int]) -> tuple[ModelRunner, Scheduler]:
    """Return a runner and a scheduler with room for these prompts at the same time."""
    num_pages = _pages(loaded.layout, prompts)
    cache = CacheConfig(enable_prefix_caching=False)
    few_rows = replace(loaded.sched, max_num_seqs=len(prompts))
    runner = ModelRunner(replace(loaded, shapes=(), sched=few_rows), num_pages)
    return runner, Scheduler(
        loaded.layout, num_pages, cache, loaded.sched, state_write_interval=loaded.state_write_interval
    )


def _request(length: int, max_tokens: int, number: int = -1, **params: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **params})
    return Request(f"made-up-{length}-{number}", np.zeros(length, np.int32), sampling, max_tokens, seed=0)
