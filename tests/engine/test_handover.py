"""Prefill/decode disaggregation under a real model: D continues what P has computed, with the bits of one engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkpoint.engine.llm import LLM
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from tests.engine.test_host_tier import bits

SHARED: dict[str, Any] = {"max_model_len": 768, "num_threads": 1, "deterministic": True, "log_level": "warning"}
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
LENGTHS = (1, 63, 64, 65, 128, 300, 512, 640)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 90, length).tolist()


def engine(model: Path, role: str | None, **more: Any) -> LLM:
    options = {**SHARED, **more}
    if role is not None:
        options["kv_transfer_config"] = {"kv_connector": "NixlConnector", "kv_role": role, **more.pop("link", {})}
        options.pop("link", None)
    return LLM(str(model), **options)


def ask(llm: LLM, token_ids: list[int], params: Mapping[str, Any] | None = None, **more: Any) -> RequestOutput:
    wanted = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "ignore_eos": True, **more}
    [output] = llm.generate(token_ids, SamplingParams(**wanted, kv_transfer_params=params), use_tqdm=False)
    llm._engine.core.scheduler.check_integrity()
    return output


def computed(llm: LLM, token_ids: list[int], **more: Any) -> dict[str, Any]:
    """Let P compute a prompt, and return what its answer says for D."""
    params = ask(llm, token_ids, ASKS, max_tokens=1, **more).kv_transfer_params
    assert params is not None
    return dict(params)


@pytest.fixture(scope="module")
def one(tiny_model: Path) -> Iterator[LLM]:
    with engine(tiny_model, None, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def prefill(tiny_model: Path) -> Iterator[LLM]:
    with engine(tiny_model, "kv_producer") as llm:
        yield llm


@pytest.fixture(scope="module")
def decode(tiny_model: Path) -> Iterator[LLM]:
    with engine(tiny_model, "kv_consumer") as llm:
        yield llm


def test_a_decode_engine_continues_with_the_bits_of_one_engine(one: LLM, prefill: LLM, decode: LLM) -> None:
    for seed, length in enumerate(LENGTHS):
        token_ids = prompt(seed, length)
        output = ask(prefill, token_ids, ASKS, max_tokens=1)
        answer = ask(decode, token_ids, output.kv_transfer_params)
        whole = (length - 1) // 64 * 64
        assert answer.cache.num_peer_tokens == answer.cache.num_restored_tokens == whole
        assert bits(answer) == bits(ask(one, token_ids))
    figures = decode.get_metrics()
    assert figures["peer_hit_tokens"] == sum((length - 1) // 64 * 64 for length in LENGTHS)
    assert figures["peer_failed_fetches"] == 0 and figures["peer_fetched_bytes"] > 0
