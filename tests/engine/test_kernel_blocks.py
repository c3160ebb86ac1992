"""Attention that reads a block in parts finds the same keys: with hits, compaction and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.platform import DeviceTraits

PROMPTS = [[5 + i % (7 + n) for i in range(60 + 25 * n)] for n in range(5)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=1)


def _answers(folder: Path, **options: Any) -> list[Any]:
    """Return the answers to prompts that are sent twice, in an arena too small for all their blocks."""
    numbers: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 9 << 17, "max_num_batched_tokens": 128}
    chosen = {"cpu_ops": "torch", "deterministic": True, "log_level": "error", "num_threads": 1, **numbers, **options}
    with LLM(str(folder), device="cpu", **chosen) as llm:
        outputs = [output for _ in range(2) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        metrics = llm.get_metrics()
        assert metrics["moves"] > 0 and metrics["hit_tokens"] > 0
        assert "speculative_config" not in options or metrics["num_draft_tokens"] > 0
        return [output.outputs[0].token_ids for output in outputs]


def test_tokens_do_not_depend_on_the_split(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on drafts, whose rows use the same table."""
    whole = _answers(tiny_model)
    monkeypatch.setattr(CpuPlatform, "traits", _of(128, 16))
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}
    assert _answers(tiny_model, speculative_config=drafts) == whole


def test_blocks_that_no_size_divides_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "traits", _of(128))
    with pytest.raises(ConfigError, match="reads blocks of 128 tokens; none divides a block of 64"):
        LLM(str(tiny_model), device="cpu", cpu_ops="torch", log_level="error")


def _of(*sizes: int) -> Any:
    def traits(cls: type[CpuPlatform], device: torch.device) -> DeviceTraits:
        return DeviceTraits(kernel_block_sizes=sizes)

    return classmethod(traits)
