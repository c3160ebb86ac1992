"""Folders of multimodal models whose text part alone runs: transformers' logits, a log line for each unused part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forkpoint import LLM, SamplingParams
from forkpoint.errors import InvalidPromptError, ModelFolderError, UnsupportedModelError
from forkpoint.models.registry import load_config, load_model
from forkpoint.ops.select import torch_table
from tests.checkpoints import COMMON, DENSE, GDN, HEAD, QWEN4, make_state_sensitive, write_checkpoint
from tests.checkpoints import VISION as QWEN_VISION
from tests.driver import Driver
from tests.image_models import picture
from tests.lfm2_vl_models import write_lfm2_vl
from tests.ling_vl_models import write_ling_vl
from tests.nemotron_omni_models import write_nemotron_omni

TOLERANCE = 1e-4  # of the logits' standard deviation
TOKENS = list(range(2, 132))


def lfm2_vl_moe(folder: Path) -> Any:
    return write_lfm2_vl(folder, moe=True)


def lfm3_vl(folder: Path) -> Any:
    kinds = ["conv", "full_attention", "sliding_attention", "conv"]
    text = {**COMMON, **HEAD, **DENSE, "model_type": "lfm3", "layer_types": kinds, "sliding_window": 70}
    text |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    options = {"projector_hidden_size": 48, "tie_word_embeddings": False}
    config = transformers.Lfm3VlConfig(text_config=text, vision_config={**vision, "num_key_value_heads": 2}, **options)
    return saved(transformers.Lfm3VlForConditionalGeneration(config), folder)


def minicpm_v(folder: Path) -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**COMMON, **HEAD, **GDN, **DENSE, "model_type": "qwen3_5_text"}
    config = transformers.MiniCPMV4_6Config(text_config=text, vision_config={**vision, "image_size": 64})
    return saved(transformers.MiniCPMV4_6ForConditionalGeneration(config), folder)


def intern_s2(folder: Path) -> Any:
    """Qwen3.5 with experts, and an encoder of time series that transformers does not have."""
    model = write_checkpoint(folder, "qwen3_5_multimodal")
    change(folder, lambda values: values, "InternS2PreviewForConditionalGeneration")
    add(folder, {"model.time_series.conv.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)})
    return model


def ling_vl(folder: Path) -> Any:
    """Ling-3.0 beside a vision tower; transformers has the text model alone."""
    return write_ling_vl(folder).text


def qwen4_exp_vl(folder: Path) -> Any:
    text = {**QWEN4, "model_type": "qwen4_exp_text"}
    vision = {**QWEN_VISION, "spatial_merge_size": 1, "patch_size": 2, "temporal_patch_size": 1}
    config = transformers.Qwen4ExpConfig(text_config=text, vision_config=vision)
    return saved(transformers.Qwen4ExpForConditionalGeneration(config), folder)


FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "lfm2_vl_moe": (lfm2_vl_moe, ["(model.multi_modal_projector.*)", "(model.vision_tower.*)"]),
    "lfm3_vl": (lfm3_vl, ["(model.multi_modal_projector.*)", "(model.vision_tower.*)"]),
    "minicpm_v": (minicpm_v, ["(model.merger.*)", "(model.vision_tower.*)"]),
    "nemotron_omni": (write_nemotron_omni, ["(mlp1.*)", "(vision_model.*)"]),
    "intern_s2": (intern_s2, ["(model.time_series.*)", "(model.visual.*)", "(mtp.*)"]),
    "glm5_next": (lambda folder: write_checkpoint(folder, "glm5_next"), ["(model.visual.*)"]),
    "qwen4_exp_vl": (qwen4_exp_vl, ["(model.visual.*)"]),
    "ling_vl": (ling_vl, ["(linear_proj.*)", "(model.visual.*)"]),
}


def saved(model: Any, folder: Path) -> Any:
    make_state_sensitive(model.eval(), 0)
    model.save_pretrained(folder)
    return model


def change(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]], architecture: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**edit(json.loads(path.read_text())), "architectures": [architecture]}))


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})


@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_text_has_transformers_logits_and_unused_parts_a_line_each(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="forkpoint")
    write, unused = FOLDERS[name]
    theirs = write(tmp_path)
    driver = Driver(load_model(tmp_path, ops=torch_table()))
    got = driver.prefill(driver.row(), TOKENS, [64])
    want = theirs(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].float()
    assert float((got - want).abs().max() / want.std()) <= TOLERANCE
    lines = sorted(line.split()[-1] for line in caplog.messages if line.startswith("weights not used"))
    assert lines == unused
    add(tmp_path, {"model.other_tower.weight": torch.ones(2)})
    with pytest.raises(ModelFolderError, match=r"does not use: 'model\.other_tower\.weight'"):
        load_model(tmp_path, ops=torch_table())


@pytest.mark.parametrize("name", ["minicpm_v", "qwen4_exp_vl"])
def test_pictures_are_refused_in_words(name: str, tmp_path: Path) -> None:
    FOLDERS[name][0](tmp_path)
    llm = LLM(
        str(tmp_path), skip_tokenizer_init=True, device="cpu", cpu_ops="torch", max_model_len=256, log_level="error"
    )
    prompt: Any = {"prompt_token_ids": [5, 6, 7], "multi_modal_data": {"image": picture(0, 32, 32)}}
    with pytest.raises(InvalidPromptError, match="has no vision tower that forkpoint runs"):
        llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (None, ModelFolderError, "has llm_config=None; an object with the text model's fields is needed"),
        ({"model_type": "llama"}, None, ""),
        ({"model_type": "gpt_oss"}, UnsupportedModelError, "is of a gpt_oss; forkpoint runs .* the text parts of Bail"),
    ],
)
def test_other_text_models_are_read_or_refused(
    text: Any, error: type[Exception] | None, says: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "llama")
    inner = {"llm_config": {**json.loads((tmp_path / "config.json").read_text()), **text}} if text else {}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NemotronH_Nano_VL_V2"], **inner}))
    if error is None:
        load_model(tmp_path, ops=torch_table())
    else:
        with pytest.raises(error, match=says):
            load_model(tmp_path, ops=torch_table())


@pytest.mark.parametrize("name", FOLDERS)
def test_overrides_reach_the_text_model(name: str, tmp_path: Path) -> None:
    """vLLM's scripts give fields by their names alone. Fields that name the whole folder stay outside."""
    FOLDERS[name][0](tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    inner = next(name for name in ("text_config", "llm_config") if name in values)
    alone = {"max_position_embeddings": 77, "eos_token_id": 9, "architectures": values["architectures"]}
    for overrides in (alone, {inner: alone}, {"max_position_embeddings": 99, inner: alone}):
        config = load_config(tmp_path, hf_overrides=overrides)
        assert config.max_model_len == 77 and 9 in config.eos_token_ids
    assert load_config(tmp_path).max_model_len > 99
    # vLLM calls it text_config in every folder
    usual, own = (load_config(tmp_path, hf_overrides={name: alone}) for name in ("text_config", inner))
    assert usual == own
    with pytest.raises(ModelFolderError, match=f"{inner}=3; an object"):
        load_config(tmp_path, hf_overrides={"text_config": alone, inner: 3})


def test_a_text_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(ModelFolderError, match="with --hf-overrides has text_config=3; an object"):
        load_config(tmp_path, hf_overrides={"text_config": 3})
