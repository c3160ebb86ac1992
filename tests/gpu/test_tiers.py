"""Tiers and pairs on a CUDA device: answers have the bits of an engine without a cache."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_tiers import bits_of
from forkpoint.engine.llm import LLM
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from tests.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)


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
    room = (layout.num_pages_for(1100, 4) + 1) * layout.page_bytes  # one request and little else
    with LLM(str(tmp_path), kv_cache_memory_bytes=room, kv_offloading_size=0.25, **shared) as llm:
        tier, until = llm._engine.core.scheduler.cache.tiers.host, time.monotonic() + 60
        while not getattr(tier, "is_ready", False) and time.monotonic() < until:
            llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
        answers.append(llm.generate(prompts, PARAMS, use_tqdm=False))
        metrics = llm.get_metrics()
        llm._engine.core.scheduler.check_integrity()
    assert [bits_of(output) for output in answers[0]] == [bits_of(output) for output in answers[1]]
    assert metrics["host_hit_tokens"] > 0 and metrics["host_stored_bytes"] > 0 and metrics["num_replayed_steps"] > 0


SHARED: dict[str, Any] = {
    "device": "cuda",
    "deterministic": True,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 3,
    "log_level": "warning",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", "qwen3_next", dtype=torch.bfloat16)
    return tmp_path / "model"


@pytest.fixture
def talks() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(2, 250, int(rng.integers(200, 900))).tolist() for _ in range(6)]


@pytest.mark.parametrize("host", [{}, {"kv_offloading_size": 0.25}], ids=["disk alone", "below a host tier"])
def test_a_restarted_engine_finds_what_is_on_the_disk(
    model: Path, talks: list[list[int]], tmp_path: Path, host: dict[str, Any]
) -> None:
    longer = [talk + [7] * 70 for talk in talks]
    with LLM(str(model), enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20, **SHARED) as llm:
        layout = llm._engine.core.scheduler.layout
        expected = [bits_of(output) for output in llm.generate(longer, PARAMS, use_tqdm=False)]
    room = (layout.num_pages_for(3 * 1100, 9) + 1) * layout.page_bytes
    disk = {"kv_cache_memory_bytes": room, "kv_disk_path": str(tmp_path / "disk"), "kv_disk_size": 0.5, **host}
    with LLM(str(model), **disk, **SHARED) as llm:
        llm.generate(talks, PARAMS, use_tqdm=False)
    with LLM(str(model), **disk, **SHARED) as llm:
        answers = llm.generate(longer, PARAMS, use_tqdm=False)
        metrics = llm.get_metrics()
        llm._engine.core.scheduler.check_integrity()
    assert [bits_of(output) for output in answers] == expected
    assert metrics["disk_hit_tokens"] > 0 and metrics["disk_failed_reads"] == 0
    assert answers[0].cache.num_restored_tokens > 0, "the first request after the restart"


def test_a_pair_gives_the_bits_of_one_engine(model: Path, talks: list[list[int]]) -> None:
    asks = SamplingParams(max_tokens=1, ignore_eos=True, kv_transfer_params={"do_remote_decode": True})
    room = {"kv_cache_memory_bytes": 64 << 20}

    def link(role: str) -> dict[str, Any]:
        return {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role}, **room}

    with LLM(str(model), enable_prefix_caching=False, **room, **SHARED) as llm:
        expected = [bits_of(output) for output in llm.generate(talks, PARAMS, use_tqdm=False)]
    with (
        LLM(str(model), **link("kv_producer"), **SHARED) as first,
        LLM(str(model), **link("kv_both"), **SHARED) as second,
    ):
        offers = [output.kv_transfer_params for output in first.generate(talks, asks, use_tqdm=False)]
        each = [replace(PARAMS, kv_transfer_params=offer) for offer in offers]
        answers = second.generate(talks, each, use_tqdm=False)
        second._engine.core.scheduler.check_integrity()
    assert [bits_of(output) for output in answers] == expected
    whole = [(len(talk) - 1) // 64 * 64 for talk in talks]
    assert [output.cache.num_peer_tokens for output in answers] == whole
