"""The arguments that scripts give to vLLM's `LLM`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from forkpoint import LLM, SamplingParams
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError
from forkpoint.vllm_options import plain_options


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"max_model_len": "128k"}, {"max_model_len": 128_000}),
        ({"max_model_len": "128K"}, {"max_model_len": 131_072}),
        ({"max_model_len": "32768"}, {"max_model_len": 32_768}),
        ({"max_model_len": -1}, {}),
        ({"max_model_len": "auto"}, {}),
        ({"max_model_len": None, "seed": None, "enable_prefix_caching": None, "dtype": None}, {}),
        ({"max_num_batched_tokens": "16k"}, {"max_num_batched_tokens": 16_000}),
        ({"kv_cache_memory_bytes": "1GiB"}, {"kv_cache_memory_bytes": 2**30}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"kv_cache_dtype": "fp8_e4m3", "mamba_ssm_cache_dtype": "auto"}, {"kv_cache_dtype": "fp8"}),
        ({"load_format": "hf", "quantization": "AWQ"}, {"load_format": "auto", "quantization": "awq"}),
        ({"hf_overrides": {"max_position_embeddings": 9}}, {"hf_overrides": {"max_position_embeddings": 9}}),
        ({"limit_mm_per_prompt": {"image": {"count": 2, "width": 512}, "audio": 0}}, {}),
        ({"revision": "main", "tokenizer_revision": None, "enforce_eager": True}, {"enforce_eager": True}),
    ],
)
def test_values_are_spelled_as_vllm_spells_them(given: dict[str, Any], found: dict[str, Any]) -> None:
    options, lines = plain_options(given)
    assert lines == [] and found.items() <= options.items()
    config = EngineConfig.from_flat(model="m", **options)
    assert all(getattr(config, name) == value for name, value in found.items() if hasattr(config, name))


class Mode(Enum):
    """Stands for vLLM's CUDAGraphMode, which JSON cannot express."""

    FULL = 2


NEUTRAL = {
    "trust_remote_code": False,
    "tokenizer_mode": "auto",
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "cpu_offload_gb": 0,
    "enable_lora": False,
    "logits_processors": None,
    "worker_extension_cls": "",
    "runner": "generate",
    "enable_chunked_prefill": True,
    "logprobs_mode": "raw_logprobs",
}


def test_a_script_for_vllm_starts(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted = {
        "trust_remote_code": True,
        "swap_space": 4,
        "compilation_config": {"cudagraph_mode": Mode.FULL},
        "max_logprobs": 20,
        "scheduling_policy": "fcfs",
    }
    options: dict[str, Any] = {"max_model_len": "auto", "dtype": "float32", "device": "cpu", "cpu_ops": "torch"}
    with LLM(str(tiny_model), skip_tokenizer_init=True, **options, **{**NEUTRAL, **noted}) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    lines = capsys.readouterr().err.splitlines()
    said = [line.partition("] ")[2] for line in lines if "changes nothing here" in line]
    assert [line.partition(" ")[0] for line in said] == list(noted)
    assert "trust_remote_code changes nothing here: no code that comes with a model is ever run" in said
    assert plain_options(NEUTRAL) == ({}, [])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"enable_lora": True}, "enable_lora=True is not possible here: adapters are not supported; leave it out"),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2 is not possible here: one engine .*; give 1, or leave",
        ),
        (
            {"tokenizer_mode": "mistral"},
            "tokenizer_mode='mistral' is not possible here: folders are Hugging Face's; give",
        ),
        ({"runner": "pooling"}, "runner='pooling' is not possible here: models generate text; give auto or generate"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4 is not possible here"),
        ({"logits_processors": ["a.b"]}, r"logits_processors=\['a.b'\] is not possible here"),
        (
            {"rope_scaling": {"factor": 4}},
            "--hf-overrides changes fields of config.json, such as rope_parameters; leave",
        ),
        ({"max_model_len": "long"}, "'long' is not a number of tokens; give an integer, one with a unit"),
        ({"dtype": "half"}, "dtype=half is not possible: nothing here computes in float16; give bfloat16, or"),
        ({"dtype": torch.float16}, "dtype=float16 is not possible: nothing here computes in float16"),
        ({"dtype": "int8"}, "dtype='int8' is not allowed; give one of 'auto', 'float32', 'bfloat16'"),
        ({"load_format": "gguf"}, "load_format='gguf' is not allowed; give one of 'auto', 'safetensors', "),
        ({"quantization": "bitsandbytes"}, "quantization='bitsandbytes' is not allowed; give one of 'fp8', 'modelopt'"),
        ({"hf_overrides": print}, "is not allowed; give a JSON object"),
        ({"max_models_len": 3}, "unknown option 'max_models_len'; did you mean max_model_len"),
    ],
)
def test_what_is_not_here_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_flat(model="m", **plain_options(given)[0])
