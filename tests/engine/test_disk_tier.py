"""A disk tier under a real model: what it holds is found by the next engine, and gives the bits of an uncached one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.gpu_tiers import bits_of
from forkpoint.engine.llm import LLM
from forkpoint.outputs import RequestOutput
from tests.checkpoints import write_checkpoint
from tests.engine.real import MORE_MODELS
from tests.engine.test_host_tier import PARAMS, ROOM

SHARED: dict[str, Any] = {"max_model_len": 768, "num_threads": 1, "deterministic": True, "log_level": "warning"}
TALKS = [np.random.default_rng(seed).integers(5, 90, 500).tolist() for seed in range(5)]
NEXT = [talk + np.random.default_rng(seed + 9).integers(5, 90, 40).tolist() for seed, talk in enumerate(TALKS)]


def disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {**SHARED, "kv_cache_memory_bytes": ROOM, "kv_disk_path": str(folder), "kv_disk_size": 0.1, **more}


def ask(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    outputs = [llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in prompts]
    llm._engine.core.scheduler.check_integrity()
    return outputs


@pytest.fixture(scope="module")
def filled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[RequestOutput]]]:
    """A folder with entries of an engine that has ended, and the answers to NEXT without a cache."""
    folder = tmp_path_factory.mktemp("disk") / "tier"
    with LLM(str(tiny_model), **SHARED, enable_prefix_caching=False) as llm:
        expected = ask(llm, NEXT)
    with LLM(str(tiny_model), **disk(folder)) as llm:
        ask(llm, TALKS)
    yield folder, expected


@pytest.fixture
def folder(filled: tuple[Path, list[RequestOutput]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled[0], tmp_path / "copy"))


@pytest.mark.parametrize("more", [{}, {"kv_offloading_size": 0.05}, {"distributed_executor_backend": "mp"}], ids=str)
def test_a_restarted_engine_hits_with_the_bits_of_an_uncached_one(
    tiny_model: Path, filled: tuple[Path, list[RequestOutput]], folder: Path, more: dict[str, Any]
) -> None:
    with LLM(str(tiny_model), **disk(folder, **more)) as llm:
        answers = ask(llm, NEXT)
        metrics = llm.get_metrics()
    assert [bits_of(output) for output in answers] == [bits_of(output) for output in filled[1]]
    restored = [output.cache.num_restored_tokens for output in answers]
    assert restored[0] >= 448, "the first request after the restart"
    assert metrics["disk_hit_tokens"] == sum(restored) and metrics["disk_failed_reads"] == 0


@pytest.mark.parametrize(("family", "widest"), [("mamba2", 1024), ("mistral", 99), ("mistral", 1024), ("lfm3", 1024)])
def test_families(
    tmp_path: Path, family: str, widest: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without attention, and with windows: in all layers, in some, and too wide to be stored with each state."""
    monkeypatch.setattr("forkpoint.worker.build.WIDEST_STORED", widest)
    kind, config = MORE_MODELS[family]
    write_checkpoint(tmp_path, kind, vocab_size=128, **config)
    options = {**disk(tmp_path / "disk"), "skip_tokenizer_init": True, "kv_offloading_size": 0.01}
    with LLM(str(tmp_path), **{**options, "log_level": "info"}) as llm:
        ask(llm, TALKS[:2])
    with LLM(str(tmp_path), **options) as llm:
        answers = ask(llm, NEXT[:2])
        assert llm.get_metrics()["disk_failed_reads"] == 0
        assert llm.reset_prefix_cache()
        assert [bits_of(each) for each in answers] == [bits_of(each) for each in ask(llm, NEXT[:2])]
    assert all(answer.cache.num_restored_tokens >= 448 for answer in answers)
    log = capsys.readouterr().err
    assert ("keep all blocks" in log) is (widest < 1024)
    assert ("block of a window of" in log) is (family != "mamba2" and widest == 1024)


def change_weights(model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "what", ["weights", {"dtype": "bfloat16"}, {"mamba_ssm_cache_dtype": "bfloat16"}, {"deterministic": False}], ids=str
)
def test_another_model_or_other_numbers_find_nothing(
    tiny_model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: Any
) -> None:
    model, more = tiny_model, what
    if what == "weights":
        model, more = Path(shutil.copytree(tiny_model, tmp_path / "model")), {}
        change_weights(model)
    with LLM(str(model), **disk(folder, **more)) as llm:
        assert ask(llm, NEXT[:1])[0].cache.num_cached_tokens == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "disk tier" in line]
    assert len(lines) == 1 and "of another model" in lines[0]
    if what == "weights":  # both models find their own entries
        for each in (tiny_model, model):
            with LLM(str(each), **disk(folder)) as llm:
                assert ask(llm, NEXT[:1])[0].cache.num_restored_tokens >= 448
        assert "disk tier" not in capsys.readouterr().err


def test_damaged_contents_are_computed(
    tiny_model: Path, filled: tuple[Path, list[RequestOutput]], folder: Path
) -> None:
    [slab] = folder.glob("*/slab.0")
    data = bytearray(slab.read_bytes())
    data[::512] = bytes(byte ^ 1 for byte in data[::512])
    slab.write_bytes(data)
    with LLM(str(tiny_model), **disk(folder)) as llm:
        answers = ask(llm, NEXT)
        assert llm.get_metrics()["disk_failed_reads"] > 0
    assert [bits_of(output) for output in answers] == [bits_of(output) for output in filled[1]]


def test_a_reset_reaches_the_disk(tiny_model: Path, folder: Path) -> None:
    with LLM(str(tiny_model), **disk(folder)) as llm:
        assert llm.reset_prefix_cache()
    with LLM(str(tiny_model), **disk(folder)) as llm:
        assert ask(llm, NEXT[:1])[0].cache.num_cached_tokens == 0


@pytest.mark.parametrize("put_back_s", [0, 7200])
def test_nothing_is_written_beyond_the_limit_of_a_day(
    tiny_model: Path, tmp_path: Path, put_back_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock may be put back between two starts."""
    limit = 300_000
    options = disk(tmp_path / "disk", kv_disk_write_limit=limit / 2**30, kv_cache_memory_bytes=ROOM // 2)
    ahead = SimpleNamespace(time=lambda: time.time() + put_back_s)
    with monkeypatch.context() as patch, LLM(str(tiny_model), **options) as llm:
        patch.setattr("forkpoint.disk.store.time", ahead)
        ask(llm, TALKS)
        first = llm.get_metrics()
        assert 0 < first["disk_stored_bytes"] <= limit and first["disk_skipped"] > 0
    with LLM(str(tiny_model), **options) as llm:
        ask(llm, TALKS)
        assert first["disk_stored_bytes"] + llm.get_metrics()["disk_stored_bytes"] <= limit, "the day is the same"
