"""Layers that keep nothing, keys and a state at once, or a convolution's window alone, served with checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forkpoint
from forkpoint.engine.llm import LLM
from forkpoint.models.registry import MODELS, load_config, load_model
from forkpoint.ops.select import torch_table
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from forkpoint.runtime.runner import ModelRunner
from tests.models.mixed_family import Mixed

PROMPT = [(7 * i * i + i) % 90 for i in range(300)]
CONFIG = {
    "architectures": ["MixedForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "layer_types": ["parallel", "mlp", "conv", "delta", "attention", "ema", "parallel"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
}
OTHERS = {"num_hidden_layers": 4, "layer_types": ["delta", "kda", "scan", "conv"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "MixedForCausalLM" not in MODELS.names():
        forkpoint.register_model(Mixed)
    path = tmp_path_factory.mktemp("mixed")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def start(folder: Path, **options: Any) -> LLM:
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "deterministic": True, "cpu_ops": "torch"}
    return LLM(str(folder), kv_cache_memory_bytes=1 << 24, log_level="error", **given | options)


def ask(llm: LLM, prompt: list[int]) -> RequestOutput:
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}], SamplingParams(temperature=0.0, max_tokens=20, logprobs=2), use_tqdm=False
    )
    return output


def test_every_layer_says_what_it_keeps(folder: Path) -> None:
    names = [[tensor.name for spec in layer for tensor in spec.tensors] for layer in load_config(folder).layer_specs]
    both = ["k", "v", "conv", "matrix"]
    assert names == [both, [], ["conv"], ["conv", "matrix"], ["k", "v"], ["sum"], both]


@pytest.mark.parametrize("force_state_copy", [False, True])
def test_cached_equals_uncached(folder: Path, force_state_copy: bool) -> None:
    turn = [5, 6, 7] * 30
    plain = start(folder, enable_prefix_caching=False)
    llm = start(folder, force_state_copy=force_state_copy)
    first = ask(llm, PROMPT)
    longer = PROMPT + list(first.outputs[0].token_ids) + turn
    second, again = ask(llm, longer), ask(llm, PROMPT)
    assert (first.num_cached_tokens, second.num_cached_tokens, again.num_cached_tokens) == (0, 256, 256)
    assert [ask(plain, prompt).outputs for prompt in (PROMPT, longer)] == [first.outputs, second.outputs]
    assert again.outputs == first.outputs


def test_what_is_kept_matters(folder: Path) -> None:
    """Every tensor of every layer: a hit that finds one of them wiped gives other probabilities."""
    llm = start(folder)
    runner = llm._engine.core._runner
    assert isinstance(runner, ModelRunner)
    want = ask(llm, PROMPT)
    for cache in runner.arena.layers:
        for view in cache.values():
            llm.reset_prefix_cache()
            assert ask(llm, PROMPT).outputs == want.outputs
            view.zero_()
            assert ask(llm, PROMPT).outputs != want.outputs


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_states_that_are_written_every_few_tokens_beside_others(
    folder: Path, tmp_path: Path, speculative: dict[str, Any] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | OTHERS))
    found = []
    for interval in (1, 8):
        options = {"deterministic": False, "speculative_config": speculative, "state_write_interval": interval}
        with start(tmp_path, **options) as llm:
            found.append([ask(llm, prompt).outputs[0].token_ids for prompt in (PROMPT, PROMPT[:7] * 12)])
    assert found[0] == found[1]


def test_what_states_are_folded_by_is_found_in_parts_of_parts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | OTHERS))
    model = load_model(tmp_path, ops=torch_table(), load_format="dummy")
    assert list(model.fold_constants) == [(2, "scan")]
