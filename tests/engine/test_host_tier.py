"""A host tier under a real model: restored prefixes give the bits of an engine without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_tiers import bits_of
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
ROOM = 3 << 19  # bytes of arena: fewer than all prompts together take


def test_restored_prefixes_give_the_bits_of_an_engine_without_a_cache(tiny_model: Path) -> None:
    rng = np.random.default_rng(0)
    talks = [rng.integers(5, 90, 500).tolist() for _ in range(5)]
    prompts = [talk + rng.integers(5, 90, 40).tolist() for _ in range(2) for talk in talks]
    shared: dict[str, Any] = {"max_model_len": 768, "num_threads": 1, "deterministic": True, "log_level": "error"}
    tier = {"kv_cache_memory_bytes": ROOM, "kv_offloading_size": 0.05}
    answers = []
    for options in ({"enable_prefix_caching": False}, tier):
        with LLM(str(tiny_model), **shared, **options) as llm:
            answers.append([llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in prompts])
            metrics = llm.get_metrics()
            llm._engine.core.scheduler.check_integrity()
    assert [bits_of(output) for output in answers[0]] == [bits_of(output) for output in answers[1]]
    restored = [output.cache.num_restored_tokens for output in answers[1]]
    assert not any(restored[:5]) and sum(restored[5:]) >= 448
    assert metrics["host_hit_tokens"] == sum(restored) and metrics["host_loaded_bytes"] > 0
