"""Ranks in processes of their own, over gloo, answer as one process does."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_model import make_random_model
from forkpoint.config import EngineConfig
from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, EngineStoppedError
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams, StructuredOutputsParams
from forkpoint.worker.build import build_worker
from forkpoint.worker.remote import RemoteRunner, start_ranks
from tests.conftest import TINY

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
LONG = "the catalogue lists every map of the town, by year and by shelf. " * 4
PROMPTS = [LONG + tail for tail in ("which is the oldest?", "who drew it?", "", "and where is it kept now? " * 9)]
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, n=2, frequency_penalty=0.3, logprobs=1),
    replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-f]{3} [0-9]{5}")),
    replace(GREEDY, prompt_logprobs=1, logit_bias={101: 4.0}),
]
LINK = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
IN_TURN: dict[str, Any] = {"kv_transfer_config": LINK, "decode_context_parallel_size": 2}
SIZES: dict[str, Any] = {"max_model_len": 768, "max_num_batched_tokens": 256, "num_threads": 1, "log_level": "error"}
ROOM = 3 << 19  # bytes of arena: fewer than all requests together take


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("halves"), replace(TINY, num_heads=4, num_kv_heads=2))


def start(folder: Path, size: int, **options: Any) -> LLM:
    chosen = {"tensor_parallel_size": size, "kv_cache_memory_bytes": ROOM // size, "device": "cpu", **SIZES, **options}
    return LLM(str(folder), **chosen)


def answers(llm: LLM) -> tuple[list[Any], dict[str, Any]]:
    """To prompts that hit, are preempted, drawn, and restricted: all that is said of them, and the engine's counts."""
    outputs = llm.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)
    outputs += llm.generate([f"short {i}" for i in range(16)], replace(GREEDY, max_tokens=70), use_tqdm=False)
    metrics = llm.get_metrics()
    assert metrics["num_preemptions"] > 0 and metrics["hit_tokens"] > 0
    return told(outputs), metrics


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All but the times, and how many tokens were drafted, which depends on them, as then do preemptions."""
    cleared: dict[str, Any] = {"metrics": None, "request_id": "", "num_preemptions": 0}
    cleared |= {"num_draft_tokens": 0, "num_accepted_tokens": 0}
    return [replace(output, **cleared) for output in outputs]


def test_two_ranks_that_gather_give_the_bits_of_one(folder: Path) -> None:
    """With drafts, and keys and values in 8 bits."""
    found, drafts = [], {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    for size in (1, 2):
        options = {"deterministic": True, "kv_cache_dtype": "fp8", "speculative_config": drafts}
        options["kv_cache_memory_bytes"] = (3 << 18) // size
        with start(folder, size, **options) as llm:
            found.append(answers(llm))
    assert found[0][0] == found[1][0]
    assert found[1][1]["num_draft_tokens"] > 0


def check_pairs(folder: Path, alone: LLM, both: LLM) -> None:
    """Each rank hands over its own share. Another number of ranks computes."""
    params = replace(GREEDY, kv_transfer_params={"do_remote_decode": True}, max_tokens=1)
    [expected] = alone.generate(LONG, GREEDY, use_tqdm=False)
    with start(folder, 2, **IN_TURN) as third:
        answers = []
        offers = [llm.generate(LONG, params, use_tqdm=False)[0].kv_transfer_params or {} for llm in (alone, both, both)]
        assert [offer["tp_size"] for offer in offers] == [1, 2, 2]
        # The first has shares of one rank. Of the last, one rank's share cannot be had.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        lost = {**offers[2], "forkpoint": {**offers[2]["forkpoint"], "more_ports": [port]}}
        for offer in (offers[0], offers[1], lost):
            [found] = third.generate(LONG, replace(GREEDY, kv_transfer_params=offer), use_tqdm=False)
            answers.append(found)
            assert found.outputs[0].token_ids == expected.outputs[0].token_ids
            third.reset_prefix_cache()
        assert [found.cache.num_peer_tokens for found in answers] == [0, 256, 0]
        assert third.get_metrics()["peer_failed_fetches"] == 2


def test_two_ranks_that_add_up_give_the_tokens_of_one(tmp_path: Path) -> None:
    """They keep the tokens of the one KV head in turn, so that as many fit as if it were cut."""
    folder = make_random_model(tmp_path / "one-kv-head", replace(TINY, num_heads=4, num_kv_heads=1))
    with start(folder, 1, kv_transfer_config=LINK) as alone, start(folder, 2, **IN_TURN) as both:
        check_pairs(folder, alone, both)
        assert both.get_metrics()["num_free_pages"] == alone.get_metrics()["num_free_pages"]
        for ours, theirs in zip(*(llm.generate(PROMPTS, PARAMS, use_tqdm=False) for llm in (both, alone)), strict=True):
            assert ours.num_cached_tokens == theirs.num_cached_tokens
            for one, other in zip(ours.outputs, theirs.outputs, strict=True):
                assert one.token_ids == other.token_ids
        assert not both._engine.core.prepare(), "a CPU has no graphs to record"
        runner, stream = both._engine.core._runner, both.stream(LONG, GREEDY)
        assert isinstance(runner, RemoteRunner)
        next(stream)
        began = time.monotonic()
        runner._ranks[1].process.kill()
        with pytest.raises(EngineStoppedError, match="the rank 1 process was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - began < 60  # gloo would wait for the dead rank for half an hour
        assert not any(rank.process.is_alive() for rank in runner._ranks)


def test_ranks_that_differ_are_told_apart_before_a_step(folder: Path) -> None:
    config = EngineConfig.from_flat(model=str(folder), tensor_parallel_size=2, device="cpu", **SIZES)
    with pytest.raises(ConfigError, match=r"ranks \d and \d do not have the same options"):
        start_ranks([config, replace(config, dtype="bfloat16")])


def test_bits_of_torchs_own_products_are_not_promised(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"deterministic": True, "cpu_ops": "torch", "tensor_parallel_size": 2, "device": "cpu", **SIZES}
    with caplog.at_level("WARNING", logger="forkpoint"):
        build_worker(EngineConfig.from_flat(model=str(folder), **options)).runner.close()
    assert "bits of 2 ranks may differ from those of one" in caplog.text
