"""A model's generation_config.json, beside what transformers reads and what vLLM documents to take of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from forkpoint.config import GENERATION_KEYS, EngineConfig
from forkpoint.demo.model import default_model
from forkpoint.engine.generation_config import sampling_defaults
from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, ModelFolderError
from forkpoint.params import SamplingParams

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "num_beams": 4,
    "length_penalty": 2.0,
    "min_p": None,
    "transformers_version": "4.51.0",
}
TAKEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_tokens": 2048}


def defaults(folder: Path, **options: Any) -> dict[str, Any]:
    return sampling_defaults(EngineConfig.from_flat(model=str(folder), **options))


def write(folder: Path, values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_only_what_vllm_takes_is_taken(tmp_path: Path) -> None:
    GenerationConfig(**QWEN).save_pretrained(tmp_path)
    assert defaults(tmp_path) == TAKEN
    assert defaults(write(tmp_path, QWEN)) == TAKEN
    assert {*TAKEN, "min_p"} - {"max_tokens"} | {"max_new_tokens"} == set(GENERATION_KEYS)


def test_the_options(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    assert defaults(model) == {}
    write(model, QWEN)
    write(other, {"temperature": 0.1})
    assert defaults(model, generation_config="vllm") == {}
    assert defaults(model, generation_config=str(other)) == {"temperature": 0.1}
    assert defaults(model, generation_config=str(other / "generation_config.json")) == {"temperature": 0.1}
    assert defaults(model, override_generation_config='{"temperature": 0.5}') == {**TAKEN, "temperature": 0.5}
    assert defaults(model, generation_config="vllm", override_generation_config={"min_p": 0.1}) == {"min_p": 0.1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"generation_config": "/nowhere"}, "/nowhere does not exist"),
        ({"override_generation_config": "{"}, "not JSON"),
        ({"override_generation_config": '{"num_beams": 2}'}, "temperature or top_p"),
        ({"override_generation_config": [1]}, "a JSON object"),
        ({"override_generation_config": {"temperature": -1}}, "temperature=-1"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        defaults(tmp_path, **options)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_p=2 .*generation_config.json.*--generation-config vllm"):
        defaults(write(tmp_path, {"top_p": 2}))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="cannot be read as JSON"):
        defaults(tmp_path)


def test_the_demo_model_has_neutral_defaults() -> None:
    assert sampling_defaults(EngineConfig.from_flat(model=default_model())) == {}


def test_llm_uses_them_where_nothing_is_given(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "generation_config.json"
    given = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**given, "top_k": 1, "max_new_tokens": 7}))
    with LLM(str(folder), max_model_len=256, seed=3) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1, max_tokens=7)
        [silent] = llm.generate("a prompt", use_tqdm=False)
        [greedy] = llm.generate("a prompt", SamplingParams(temperature=0, max_tokens=7), use_tqdm=False)
        *_, streamed = llm.stream("a prompt")
        [own] = llm.generate("a prompt", SamplingParams(max_tokens=3), use_tqdm=False)
    assert silent.outputs[0].token_ids == greedy.outputs[0].token_ids == streamed.outputs[0].token_ids
    assert len(own.outputs[0].token_ids) == 3
    assert f"default sampling parameters: top_k=1, max_tokens=7, from {file}" in capsys.readouterr().err
