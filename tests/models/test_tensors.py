"""A checkpoint whose tensors are not exactly those of its config.json: refused by name, told in the log, or run as
transformers runs it. Nothing is dropped in silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forkpoint.errors import ModelFolderError
from forkpoint.models.fields import canonical_name
from forkpoint.models.registry import MODELS, load_config, load_model
from forkpoint.ops.select import torch_table
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.driver import Driver
from tests.json_files import change_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENS = [5 + (7 * i * i + 3 * i) % 200 for i in range(40)]
Weights = dict[str, Tensor]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level("INFO", logger="forkpoint")
    yield caplog


def logits(folder: Path) -> Tensor:
    driver = Driver(load_model(folder, ops=torch_table()))
    return driver.prefill(driver.row(), TOKENS)


def edit(folder: Path, change: Callable[[Weights], Any], **config: Any) -> None:
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / SINGLE, {"format": "pt"})
    change_json(folder / "config.json", **config)


def refused(folder: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        load_model(folder, ops=torch_table())
    return str(caught.value)


def text_tensors(folder: Path, weights: Weights) -> list[str]:
    """Stored names that the text model needs. Integers are constants that it computes."""
    names = MODELS.find(load_config(folder).architecture).weight_names
    needed = (name for name in weights if not canonical_name(name, names).startswith("model.visual."))
    return [name for name in needed if weights[name].is_floating_point()]


def module(folder: Path, name: str) -> str:
    """What forkpoint calls the last part of a stored name, such as `q_proj`."""
    return canonical_name(name, MODELS.find(load_config(folder).architecture).weight_names).split(".")[-2]


@torch.no_grad()
def theirs(folder: Path, model: Any) -> Tensor:
    loaded = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    found: Tensor = loaded(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].float()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    model = write_checkpoint(tmp_path, family)
    whole = load_file(tmp_path / SINGLE)
    names = text_tensors(tmp_path, whole)
    middle = next(name for name in names if ".1." in name and name.endswith("weight"))

    edit(tmp_path, lambda weights: weights.update({f"{middle}_extra": torch.ones(2)}))
    assert f"{middle}_extra" in refused(tmp_path)

    for name in {middle, names[0], names[-1]}:
        save_file({key: weight for key, weight in whole.items() if key != name}, tmp_path / SINGLE, {"format": "pt"})
        if "lm_head" not in name or not load_config(tmp_path).tie_word_embeddings:
            assert module(tmp_path, name) in refused(tmp_path)

    renamed = {f"{key}_" if key == middle else key: weight for key, weight in whole.items()}
    save_file(renamed, tmp_path / SINGLE, {"format": "pt"})
    assert module(tmp_path, middle) in refused(tmp_path)

    head = torch.randn(256, 64, generator=torch.Generator().manual_seed(5)) / 8
    save_file({**whole, "lm_head.weight": head}, tmp_path / SINGLE, {"format": "pt"})
    # Without the flag transformers does not share Zamba2's transformers either, and their copies are not in the file.
    for flag in (True,) if family == "zamba2" else (True, False):
        edit(tmp_path, lambda weights: None, tie_word_embeddings=flag)
        log.clear()
        want = theirs(tmp_path, model)
        assert float((logits(tmp_path) - want).abs().max() / want.std()) <= 1e-3
        assert ("lm_head.weight that differs" in log.text) == flag


def test_a_head_equal_to_the_embeddings_is_kept_once(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, "qwen3")
    edit(
        tmp_path,
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
        tie_word_embeddings=True,
    )
    both = logits(tmp_path)
    assert not log.text
    edit(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    assert torch.equal(logits(tmp_path), both)
    edit(tmp_path, lambda weights: None, tie_word_embeddings=False)
    assert "'lm_head.weight'" in refused(tmp_path)


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_either_flag_of_a_multimodal_folder_ties(outer: bool | None, inner: bool | None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5_multimodal")
    edit(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for part, flag in ((values, outer), (values["text_config"], inner)):
        part.pop("tie_word_embeddings", None)
        if flag is not None:
            part["tie_word_embeddings"] = flag
    path.write_text(json.dumps(values))
    if outer or inner:
        assert bool(logits(tmp_path).isfinite().all())
    else:
        assert "'lm_head.weight'" in refused(tmp_path)


def test_parts_that_are_not_used_have_a_line_each(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, "qwen3_5_multimodal")
    more = {
        "mtp.fc.weight": torch.ones(2),
        "model.language_model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    edit(tmp_path, lambda weights: weights.update(more))
    (tmp_path / "adapter_model.safetensors").write_bytes((tmp_path / SINGLE).read_bytes())
    logits(tmp_path)
    lines = [message for message in log.messages if "not used" in message or "not read" in message]
    assert len(lines) == 4
    for part in (
        "vision tower (model.visual.*)",
        "MTP head (mtp.*)",
        "rotary frequencies",
        "adapter_model.safetensors",
    ):
        assert sum(part in line for line in lines) == 1


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5")
    edit(tmp_path, lambda weights: weights.update({"model.language_model.norm.weight": torch.ones(64)}))
    assert "'model.norm.weight'" in refused(tmp_path) and "'model.language_model.norm.weight'" in refused(tmp_path)


def test_shards_that_hold_more_than_the_index_says(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, "qwen3", shard_size="100KB")
    want = logits(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    listed = {name: shard for name, shard in index["weight_map"].items() if "layernorm" not in name}
    change_json(tmp_path / INDEX, weight_map=listed)
    log.clear()
    assert torch.equal(logits(tmp_path), want)
    assert "does not list" in log.text and "model.layers.*.input_layernorm.weight" in log.text
    (tmp_path / INDEX).write_text(json.dumps(index))
    other = next(shard for name, shard in listed.items() if shard != index["weight_map"]["model.norm.weight"])
    shard = load_file(tmp_path / other)
    save_file({**shard, "model.norm.weight": torch.zeros(64)}, tmp_path / other, {"format": "pt"})
    log.clear()
    assert torch.equal(logits(tmp_path), want)
    assert f"{other} also holds model.norm.weight" in log.text


def test_a_single_file_beside_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", shard_size="100KB")
    save_file({"x": torch.ones(2)}, tmp_path / SINGLE)
    assert f"'{SINGLE}', which {INDEX} does not name" in refused(tmp_path)
