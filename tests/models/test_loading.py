"""Model folders: shards, dummy weights, and every way in which a folder can be wrong."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.registry import MODELS, load_config, load_model
from forkpoint.ops.select import torch_table
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.driver import Driver
from tests.json_files import change_json

TOKENS = list(range(2, 82))
SINGLE = "model.safetensors"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 11\n"


def logits(folder: Path, **options: Any) -> torch.Tensor:
    driver = Driver(load_model(folder, ops=torch_table(), **options))
    return driver.prefill(driver.row(), TOKENS)


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / SINGLE)
    edit(weights)
    save_file(weights, folder / SINGLE, {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, "qwen3_next")
    return tmp_path


def test_shards_equal_one_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", "qwen3_next_moe")
    write_checkpoint(tmp_path / "many", "qwen3_next_moe", shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "many"))


def test_layers_for_guesses_are_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bailing_hybrid")
    want = logits(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update({"model.layers.4.eh_proj.weight": torch.ones(4, 4)}))
    assert torch.equal(logits(tmp_path), want)
    change_json(tmp_path / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ModelFolderError, match="eh_proj"):
        logits(tmp_path)


def test_multimodal_layout_equals_the_text_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "both", "qwen3_5_multimodal")
    stored = load_file(tmp_path / "both" / SINGLE)
    text = {k.replace("language_model.", ""): v for k, v in stored.items() if "visual" not in k}
    write_checkpoint(tmp_path / "text", "qwen3_5_moe", seed=1)
    stored["mtp.layers.0.mlp.down_proj.weight"] = torch.zeros(2, 2)
    save_file(stored, tmp_path / "both" / SINGLE, {"format": "pt"})
    save_file(text, tmp_path / "text" / SINGLE, {"format": "pt"})
    want = logits(tmp_path / "text")
    assert torch.equal(logits(tmp_path / "both"), want)
    # as transformers 5.4 to 5.5 saves fine-tunes, and as other libraries nest them
    for outer in (
        "model.language_model.language_model.language_model.",
        "language_model.",
        "model.language_model.model.",
    ):
        nested = {k.replace("model.language_model.", outer): v for k, v in stored.items()}
        nested = {k.replace("model.visual.", "model.language_model.visual."): v for k, v in nested.items()}
        save_file(nested, tmp_path / "both" / SINGLE, {"format": "pt"})
        assert torch.equal(logits(tmp_path / "both"), want)


def test_float16_is_widened_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, "qwen3_next", dtype=torch.float16)
    want = "weights in float16 run in float32; --dtype bfloat16 halves their memory"
    assert load_model(tmp_path, ops=torch_table()).config.dtype == "float32" and want in caplog.messages
    caplog.clear()
    for dtype in ("float32", "bfloat16"):
        load_model(tmp_path, ops=torch_table(), dtype=dtype)
    assert want not in caplog.messages


def test_experts_stored_whole(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5_moe")
    want = logits(tmp_path)

    def fuse(weights: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            name = f"model.layers.{layer}.mlp.experts"
            parts = {
                kind: torch.stack([weights.pop(f"{name}.{e}.{kind}_proj.weight") for e in range(8)])
                for kind in ("gate", "up", "down")
            }
            weights[f"{name}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
            weights[f"{name}.down_proj"] = parts["down"]

    edit_weights(tmp_path, fuse)
    assert torch.equal(logits(tmp_path), want)


@pytest.mark.parametrize(("family", "dtype"), zip(FAMILIES, itertools.cycle(["float32", "bfloat16"])))
def test_dummy_weights_need_a_config_alone(family: str, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    (tmp_path / SINGLE).unlink()
    first = logits(tmp_path, load_format="dummy", dtype=dtype)
    assert bool(first.isfinite().all()) and float(first.std()) > 0.1
    assert torch.equal(first, logits(tmp_path, load_format="dummy", dtype=dtype))
    assert not torch.equal(first, logits(tmp_path, load_format="dummy", dtype=dtype, seed=1))


def test_config_values(folder: Path) -> None:
    change_json(folder / "config.json", eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    config = load_config(folder, dtype="bfloat16", max_model_len=100)
    assert config.eos_token_ids == (7, 9)
    assert (config.dtype, config.max_model_len, config.vocab_size) == ("bfloat16", 100, 256)
    model = load_model(folder, ops=torch_table(), dtype="bfloat16", state_dtype="bfloat16")
    assert [[tensor.name for spec in layer for tensor in spec.tensors] for layer in model.layer_specs] == [
        *[["conv", "matrix"]] * 3,
        ["k", "v"],
    ]
    conv, matrix = model.layer_specs[0][0].tensors
    assert conv.shape == (3, 160) and (matrix.shape, matrix.dtype) == ((4, 24, 16), "bfloat16")
    driver = Driver(model)
    assert bool(driver.prefill(driver.row(), TOKENS).isfinite().all())


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"architectures": None, "model_type": None}, ModelFolderError, "architectures"),
        ({"hidden_size": None}, ModelFolderError, "shape"),
        ({"hidden_size": "64"}, ModelFolderError, "hidden_size='64'"),
        ({"num_hidden_layers": 0}, ModelFolderError, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, ModelFolderError, "multiple"),
        ({"linear_num_key_heads": 3}, ModelFolderError, "multiple"),
        ({"layer_types": ["full_attention"]}, ModelFolderError, "layer_types"),
        ({"layer_types": ["mamba"] * 4}, UnsupportedModelError, "mamba"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, UnsupportedModelError, "longrope"),
        ({"rms_norm_eps": -1.0}, ModelFolderError, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, ModelFolderError, "tie_word_embeddings"),
        ({"eos_token_id": "x"}, ModelFolderError, "eos_token_id"),
        ({"output_gate_type": "sigmoid"}, UnsupportedModelError, "sigmoid"),
        ({"dtype": "int8"}, UnsupportedModelError, "int8"),
        ({"intermediate_size": 97}, ModelFolderError, "shape"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, ModelFolderError, "experts"),
    ],
)
def test_wrong_config(folder: Path, fields: dict[str, Any], error: type[Exception], text: str) -> None:
    change_json(folder / "config.json", **fields)
    with pytest.raises(error, match=text) as caught:
        load_model(folder, ops=torch_table())
    assert str(folder) in str(caught.value)


def test_too_long(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="2048"):
        load_model(folder, ops=torch_table(), max_model_len=4096)


def test_keys_of_another_dtype(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'bfloat16' is not possible for a model that runs in float32"):
        load_model(folder, ops=torch_table(), kv_cache_dtype="bfloat16")
    kept = load_model(folder, ops=torch_table(), kv_cache_dtype="fp8").layer_specs[-1][0]
    assert [tensor.dtype for tensor in kept.tensors] == ["float8_e4m3fn"] * 2 + ["float32"] * 2
    write_checkpoint(tmp_path / "latent", "kimi_linear")
    with pytest.raises(UnsupportedModelError, match="attention over latent reads the model's dtype; give 'auto'"):
        load_model(tmp_path / "latent", ops=torch_table(), kv_cache_dtype="fp8")


def test_unknown_architecture_lists_the_known_ones(folder: Path) -> None:
    change_json(folder / "config.json", architectures=["GptForCausalLM"])
    with pytest.raises(UnsupportedModelError) as caught:
        load_config(folder)
    assert all(name in str(caught.value) for name in MODELS.names())


def test_missing_folder_and_bad_json(folder: Path) -> None:
    with pytest.raises(ModelFolderError, match="there is no model folder"):
        load_model(folder / "nowhere", ops=torch_table())
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="JSON"):
        load_model(folder, ops=torch_table())
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="not a JSON object"):
        load_model(folder, ops=torch_table())
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json does not exist"):
        load_model(folder, ops=torch_table())


def _poison(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    return edit


def _drop(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def _store_as(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        weights[name] = weights[name].to(dtype)

    return edit


def _add(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.4.mlp.up_proj.weight"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (_poison(float("nan")), r"model\.layers\.1\.mlp\.up_proj\.weight.*NaN"),
        (_poison(float("-inf")), r"model\.layers\.1\.mlp\.up_proj\.weight.*NaN"),
        (_drop, r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (_add, r"does not use.*model\.layers\.4"),
        (_store_as(torch.int8), r"up_proj\.weight.* is stored in I8, .* F64, F32, F16, BF16; .*quantization_config"),
        (_store_as(torch.bool), r"up_proj\.weight.* is stored in BOOL, "),
        (_store_as(torch.complex64), r"up_proj\.weight.* is stored in C64, "),
    ],
)
def test_wrong_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None], text: str) -> None:
    edit_weights(folder, edit)
    with pytest.raises(ModelFolderError, match=text) as caught:
        load_model(folder, ops=torch_table())
    assert str(folder) in str(caught.value)


def test_large_finite_values_are_not_taken_for_infinite(folder: Path) -> None:
    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"].fill_(3e38)

    edit_weights(folder, enlarge)
    load_model(folder, ops=torch_table())


def test_wrong_shards(tmp_path: Path) -> None:
    def fresh(name: str) -> tuple[Path, list[Path]]:
        write_checkpoint(tmp_path / name, "qwen3_next", shard_size="100KB")
        return tmp_path / name, sorted((tmp_path / name).glob("model-*.safetensors"))

    def fails(folder: Path, text: str) -> None:
        with pytest.raises(ModelFolderError, match=text) as caught:
            load_model(folder, ops=torch_table())
        assert str(folder) in str(caught.value)

    folder, shards = fresh("missing")
    shards[1].unlink()
    fails(folder, f"{shards[1].name} is missing")
    folder, shards = fresh("cut")
    for num_bytes in (-100, 20):  # within the tensors, and within the header
        shards[1].write_bytes(shards[1].read_bytes()[:num_bytes])
        fails(folder, f"{shards[1].name} is broken")
    folder, shards = fresh("swapped")
    shards[1].write_bytes(shards[2].read_bytes())
    fails(folder, f"{shards[1].name} lacks")
    folder, shards = fresh("extra")
    for stem in ("model", "model.safetensors"):
        extra = folder / f"{stem}-00099-of-00099.safetensors"
        extra.write_bytes(shards[0].read_bytes())
        fails(folder, extra.name)
        extra.unlink()
    folder, shards = fresh("circle")
    shards[1].unlink()
    shards[1].symlink_to(shards[1].name)
    fails(folder, f"{shards[1].name} is not a regular file")
    folder, _ = fresh("index")
    (folder / "model.safetensors.index.json").write_text("{}")
    fails(folder, "weight_map")
    (folder / "model.safetensors.index.json").unlink()
    (folder / shards[1].name).unlink()
    fails(folder, f"holds no model.safetensors.index.json, and lacks shards: '{shards[1].name}'; fetch")
    (folder / "model-00001-of-00001.safetensors").write_bytes(shards[0].read_bytes())
    fails(
        folder,
        f"'{shards[0].name}'.* next to 'model-00001-of-00001.safetensors', and no model.safetensors.index.json that",
    )
    folder, _ = fresh("empty")
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    fails(folder, "load_format='dummy'")


def test_shards_without_an_index(tmp_path: Path) -> None:
    """vLLM loads them too."""
    write_checkpoint(tmp_path, "qwen3_next", shard_size="100KB")
    want = logits(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(tmp_path), want)
    for path in tmp_path.glob("model-*.safetensors"):  # as Qwen names its shards
        path.rename(tmp_path / path.name.replace("model-", "model.safetensors-"))
    assert torch.equal(logits(tmp_path), want)


def test_other_weights_are_named(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "consolidated.safetensors")
    with pytest.raises(ModelFolderError, match=r"index\.json, only 'consolidated\.safetensors'; give a folder with"):
        load_model(folder, ops=torch_table())


def test_weights_in_the_layout_of_mlx_are_named(tmp_path: Path) -> None:
    """Its convolutions have another order of dimensions; models without them are as transformers writes them."""
    for family in ("qwen3_5", "qwen3"):
        write_checkpoint(tmp_path / family, family)
        path = tmp_path / family / SINGLE
        turned = {
            name: value.transpose(1, 2).contiguous() if "conv1d" in name else value
            for name, value in load_file(path).items()
        }
        save_file(turned, path, {"format": "mlx"})
    with pytest.raises(ModelFolderError, match=r"asks for \[.*\]; MLX wrote the file; give the model that it was made"):
        load_model(tmp_path / "qwen3_5", ops=torch_table())
    load_model(tmp_path / "qwen3", ops=torch_table())


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (lambda name: f"base_model.model.{name}", "names begin with 'base_model.model.'; save the model without it"),
        (lambda name: f"_orig_mod.{name}", "names begin with '_orig_mod.'; save the model without it"),
        (
            lambda name: name.replace("q_proj.", "q_proj.lora_A.default."),
            "adapters .LoRA. do not run; merge this one into its base model, with peft's merge_and_unload",
        ),
        (lambda name: name.replace("k_proj.", "k_proj.base_layer."), "adapters .LoRA. do not run; merge this one"),
    ],
)
def test_names_that_training_leaves_are_explained(rename: Callable[[str], str], says: str, folder: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[rename(name)] = weights.pop(name)

    edit_weights(folder, change)
    with pytest.raises(ModelFolderError, match=says):
        load_model(folder, ops=torch_table())


def test_shards_stay_in_their_folder(tmp_path: Path) -> None:
    """Whatever the index says, nothing outside of the folder is opened, but for the blobs of a hub's cache."""
    repository = tmp_path / "models--someone--something"
    folder, outside = repository / "snapshots" / "main", tmp_path / "outside"
    write_checkpoint(folder, "qwen3", shard_size="100KB")
    write_checkpoint(outside, "qwen3", shard_size="100KB")
    want, path = logits(folder), folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"]["model.norm.weight"]

    def refused(name: str) -> str:
        changed = {key: name if where == shard else where for key, where in index["weight_map"].items()}
        path.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ModelFolderError) as caught:
            load_model(folder, ops=torch_table())
        return str(caught.value)

    shutil.move(folder / shard, tmp_path / "kept")
    for name in (f"../../../outside/{shard}", str(outside / shard), "/etc/passwd", "/dev/zero"):
        assert f"shard {name!r} is not inside of" in refused(name)
    (folder / "linked").symlink_to(outside / shard)
    assert "shard 'linked' is not inside of" in refused("linked")
    os.mkfifo(folder / "pipe")
    assert "not a regular file" in refused("pipe")
    assert "not a regular file" in refused(".")

    path.write_text(json.dumps(index))
    store = tmp_path / "blobs" / "ab"  # the cache's shared one
    for blobs in (repository / "blobs", store):
        blobs.mkdir(parents=True)
    shutil.move(tmp_path / "kept", store / "abcd")
    (repository / "blobs" / "etag").symlink_to("../../blobs/ab/abcd")
    (folder / shard).symlink_to("../../blobs/etag")
    assert torch.equal(logits(folder), want)


def test_pickles_are_never_loaded(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    logits(folder)
    (folder / SINGLE).unlink()
    with pytest.raises(ModelFolderError, match=r"only 'pytorch_model.bin': pickles can run code and are never loaded"):
        load_model(folder, ops=torch_table())


def test_adapters_and_gguf_are_named(folder: Path) -> None:
    """The error says what the folder holds in place of a model, with config.json and without it."""
    (folder / SINGLE).unlink()
    (folder / "small-Q4_K_M.gguf").touch()
    with pytest.raises(ModelFolderError, match=r"only 'small-Q4_K_M\.gguf': GGUF is not read; give a folder"):
        load_model(folder, ops=torch_table())
    for name in ("adapter_config.json", "adapter_model.safetensors", "training_args.bin"):
        (folder / name).touch()
    adapter = r"only 'adapter_config\.json' and 1 more: adapters \(LoRA\) do not run; merge this one"
    with pytest.raises(ModelFolderError, match=adapter):
        load_model(folder, ops=torch_table())
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=rf"config\.json does not exist, {adapter}"):
        load_model(folder, ops=torch_table())


def test_foreign_files_beside_weights_are_not_to_blame(folder: Path) -> None:
    """Training leaves pickles next to a model, whose config.json somebody forgot to copy."""
    (folder / "training_args.bin").touch()
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json does not exist; give a Hugging Face model folder"):
        load_model(folder, ops=torch_table())


def test_a_pointer_of_git_lfs_is_named(folder: Path) -> None:
    (folder / SINGLE).write_text(LFS_POINTER)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is a pointer of Git LFS; run 'git lfs pull'"):
        load_model(folder, ops=torch_table())
