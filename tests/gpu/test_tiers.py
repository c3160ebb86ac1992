"""A host tier on a CUDA device: answers have the bits of an engine without a cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forkpoint.engine.llm import LLM
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from tests.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)


def bits(output: RequestOutput) -> tuple[object, ...]:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return completion.token_ids, [sorted((k, v.logprob) for k, v in each.items()) for each in completion.logprobs]


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3}], ids=["plain", "drafts"])
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1"])
def test_restored_prefixes_have_the_bits_of_computed_ones(family: str, drafts: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    rng = np.random.default_rng(3)
    talks = [rng.integers(2, 250, int(rng.integers(200, 900))).tolist() for _ in range(6)]
    prompts = [talk + rng.integers(2, 250, int(rng.integers(1, 90))).tolist() for _ in range(3) for talk in talks]
    shared: dict[str, Any] = {
        "device": "cuda",
        "deterministic": True,
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 3,
        "speculative_config": drafts,
        "log_level": "warning",
    }
    answers: list[list[RequestOutput]] = []
    with LLM(str(tmp_path), enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20, **shared) as llm:
        layout = llm._engine.core.scheduler.layout
        answers.append(llm.generate(prompts, PARAMS, use_tqdm=False))
    room = (layout.num_pages_for(3 * 1100, 9) + 1) * layout.page_bytes  # three requests and little else
    with LLM(str(tmp_path), kv_cache_memory_bytes=room, kv_offloading_size=0.25, **shared) as llm:
        tier, until = llm._engine.core.scheduler.cache.tier, time.monotonic() + 60
        while not getattr(tier, "is_ready", False) and time.monotonic() < until:
            llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
        answers.append(llm.generate(prompts, PARAMS, use_tqdm=False))
        metrics = llm.get_metrics()
        llm._engine.core.scheduler.check_integrity()
    assert [bits(output) for output in answers[0]] == [bits(output) for output in answers[1]]
    assert metrics["host_hit_tokens"] > 0 and metrics["host_stored_bytes"] > 0 and metrics["num_replayed_steps"] > 0
