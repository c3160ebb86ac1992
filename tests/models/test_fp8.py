"""Folders in FP8: every layout against transformers on the same weights widened, and all that is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.quantization import FP8, MODELOPT_FP8, WeightFormat
from forkpoint.models.registry import load_config, load_model
from forkpoint.models.weights import FileWeights
from forkpoint.ops.linear.scaled import quantise
from forkpoint.ops.select import torch_table
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.driver import Driver
from tests.fp8_checkpoints import QUANTIZATION, SINGLE, Layout, fuse_experts, put_in_fp8, write_fp8
from tests.json_files import change_json
from tests.models.test_parity import TOLERANCE, error, oracle

TOKENS = list(range(2, 102))
# Parts of joints and heads that end on blocks of 128, and columns that do not; else a block is larger than a part.
WHOLE = {
    "hidden_size": 160,
    "head_dim": 128,
    "intermediate_size": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
WHOLE_MOE = {**WHOLE, "num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}
SHARED_APART = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 160}  # which cuts a block


def logits(folder: Path, **options: Any) -> torch.Tensor:
    driver = Driver(load_model(folder, **{"ops": torch_table(), "dtype": "float32", **options}))
    return driver.prefill(driver.row(), TOKENS, [64])


@pytest.mark.parametrize("layout", ["block", "channel"])
@pytest.mark.parametrize(
    ("family", "config", "plain"),
    [
        ("qwen3_next", {}, ()),
        ("qwen3_next", WHOLE, ()),
        ("qwen3_next_moe", SHARED_APART, ()),
        ("qwen3_5", {}, ()),
        ("qwen3_5", WHOLE, ("q_proj", "up_proj", "in_proj_z")),
        ("qwen3_5_moe", {}, ()),
        ("qwen3_5_moe", WHOLE_MOE, ()),
        ("qwen3_5_moe", {}, ("shared_expert.",)),
        ("olmo_hybrid", {}, ("a_proj", "b_proj")),
    ],
)
def test_logits_are_those_of_the_widened_weights(
    family: str, config: dict[str, Any], plain: tuple[str, ...], layout: Layout, tmp_path: Path
) -> None:
    theirs = write_fp8(tmp_path / "fp8", family, layout, more_plain=plain, **config)
    assert error(logits(tmp_path / "fp8"), oracle(theirs, TOKENS)) <= TOLERANCE


@pytest.mark.parametrize("layout", ["tensor", "modelopt"])
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_moe"])
def test_one_scale_for_a_matrix(family: str, layout: Layout, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "widened", family)
    put_in_fp8(tmp_path / "widened", tmp_path / "fp8", layout)
    want = logits(tmp_path / "widened")
    assert error(logits(tmp_path / "fp8"), want) <= TOLERANCE
    if layout == "modelopt":  # the same format described in modelopt's own file
        change_json(tmp_path / "fp8" / "config.json", quantization_config=None)
        said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*mixer.conv1d*"]}
        own = {"producer": {"name": "modelopt"}, "quantization": said}
        (tmp_path / "fp8" / "hf_quant_config.json").write_text(json.dumps(own))
        assert error(logits(tmp_path / "fp8", quantization="modelopt"), want) <= TOLERANCE


@pytest.mark.parametrize("described_by", ["compressed-tensors", "modelopt"])
def test_three_kinds_of_scales(described_by: str, tmp_path: Path) -> None:
    """Matrices with one scale are kept like the others, and those with one for each row are widened."""
    theirs = write_fp8(tmp_path / "fp8", "qwen3_5_moe", "three", **WHOLE_MOE)
    if described_by == "modelopt":
        named = {str(i): {"quant_algo": each} for i, each in enumerate(MODELOPT_FP8)}
        said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": named}
        change_json(tmp_path / "fp8" / "config.json", quantization_config=said)
    assert error(logits(tmp_path / "fp8"), oracle(theirs, TOKENS)) <= TOLERANCE
    form = load_config(tmp_path / "fp8").quantization
    weights = FileWeights(folder=tmp_path / "fp8", dtype=torch.float32, device=torch.device("cpu"), format=form)
    parts = ("1.self_attn.o_proj", "0.mlp.shared_expert.up_proj", "0.linear_attn.out_proj")
    assert [weights.form(f"model.layers.{part}.weight") for part in parts] == [FP8, FP8, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_converted_as_it_loads(family: str, tmp_path: Path) -> None:
    """Folders in FP8 of every family are in test_backends.py."""
    write_checkpoint(tmp_path, family)
    exact, near = logits(tmp_path), logits(tmp_path, quantization="fp8")
    assert error(near, exact) > 1e-3
    assert (near - exact).std() < exact.std()


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_device_without_fp8_gets_weights_as_bytes(quantization: str | None, tmp_path: Path) -> None:
    """And no operators that round what products of FP8 read."""
    write_checkpoint(tmp_path / "plain", "qwen3_5_moe")
    folder = tmp_path / "plain"
    if quantization is None:
        folder = tmp_path / "fp8"
        put_in_fp8(tmp_path / "plain", folder, "block")
    missing: Any = None
    ops = replace(torch_table(), rounding=replace(torch_table(), rmsnorm=missing, linear=missing))
    got = logits(folder, quantization=quantization, fp8_as_bytes=True, ops=ops)
    assert torch.equal(got, logits(folder, quantization=quantization))


@pytest.mark.parametrize("layout", ["block", "channel"])
def test_experts_stored_whole(layout: Layout, tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8", "qwen3_5_moe", layout, **WHOLE_MOE)
    want = logits(tmp_path / "fp8")
    fuse_experts(tmp_path / "fp8", 4)
    assert torch.equal(logits(tmp_path / "fp8"), want)


def test_widening_is_that_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight = torch.randn(256, 384)
    made = quantise(weight)
    theirs = _dequantize_fp8_weight(made.codes, made.scales, [128, 128], torch.float32)
    assert torch.equal(made.dense(), theirs)
    assert ((theirs - weight).abs() <= weight.abs() / 16 + 1e-4).all()  # e4m3 has 3 bits behind the point


def test_an_option_puts_a_plain_model_in_fp8(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5_moe")
    near, exact = logits(tmp_path, quantization="fp8"), logits(tmp_path)
    assert error(near, exact) > 1e-3
    assert (near - exact).std() < 0.4 * exact.std()
    made = logits(tmp_path, quantization="fp8", load_format="dummy")
    assert not torch.equal(made, logits(tmp_path, load_format="dummy"))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.layers.0.linear_attn.out_proj"])
def test_a_scale_changes_the_logits(name: str, tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8", "qwen3_5", "block", **WHOLE)
    want = logits(tmp_path / "fp8")
    stored = load_file(tmp_path / "fp8" / SINGLE)
    stored[f"{name}.weight_scale_inv"][0, 0] *= 2
    save_file(stored, tmp_path / "fp8" / SINGLE, {"format": "pt"})
    assert error(logits(tmp_path / "fp8"), want) > 1e-2


@pytest.mark.parametrize(
    ("end", "value", "said"),
    [
        ("weight", 0x7F, "NaN or infinite"),
        ("weight", 0xFF, "NaN or infinite"),
        ("weight_scale_inv", float("nan"), "not all positive and finite"),
        ("weight_scale_inv", 0.0, "not all positive and finite"),
        ("weight_scale_inv", None, "holds no tensor"),
    ],
)
def test_broken_weights_are_named(end: str, value: float | None, said: str, tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8", "qwen3", "block")
    stored = load_file(tmp_path / "fp8" / SINGLE)
    name = f"model.layers.1.mlp.down_proj.{end}"
    if value is None:
        del stored[name]
    elif end == "weight":
        stored[name].view(torch.uint8)[3, 5] = int(value)
    else:
        stored[name][0, 0] = value
    save_file(stored, tmp_path / "fp8" / SINGLE, {"format": "pt"})
    with pytest.raises(ModelFolderError, match=said) as caught:
        logits(tmp_path / "fp8")
    assert name in str(caught.value)


def test_fp8_without_a_config_that_says_so(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8", "qwen3", "block")
    change_json(tmp_path / "fp8" / "config.json", quantization_config=None)
    with pytest.raises(ModelFolderError, match="stored in FP8"):
        logits(tmp_path / "fp8")


def group(**weights: Any) -> dict[str, Any]:
    values = copy.deepcopy(QUANTIZATION["channel"])
    values["config_groups"]["group_0"]["weights"] |= weights
    return values


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'awq' of version 'gemv'"),
        ({"quant_method": "gptq", "bits": 8}, "'gptq' of 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'gptq' of checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8}}}, "8 bits in '+:.*down'"),
        ({"quant_method": "auto-round", "bits": 2}, "'auto-round' of 2 bits"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp'"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a.b": {"bits": 8}}}, "8 bits in 'a.b'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' 4 bits"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt's NVFP4_AWQ, which multiplies inputs"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "modelopt's W4A16_AWQ, which multiplies inputs"),
        ({"quant_algo": "NVFP4_AWQ", "group_size": 16}, "modelopt's NVFP4_AWQ, which multiplies inputs"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4"}}}, "quant_method 'torchao';"),
        ({"group_size": 64, "bits": 4, "mode": "affine"}, "MLX's 4 bits"),
        ({**QUANTIZATION["channel"], "sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        ({**QUANTIZATION["channel"], "transform_config": {"config_groups": {"R4": {}}}}, "with transforms"),
        ({**QUANTIZATION["block"], "weight_block_size": [64, 128]}, "weight_block_size [64, 128]"),
        ({**QUANTIZATION["block"], "activation_scheme": "fixed"}, "activation_scheme 'fixed'"),
        ({**QUANTIZATION["block"], "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**QUANTIZATION["channel"], "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (group(num_bits=8, type="int"), "(8-bit int)"),
        (group(num_bits=4, type="int"), "(4-bit int)"),
        (group(strategy="group"), "a scale for each group"),
        (group(strategy="block", block_structure=[64, 64]), "blocks of [64, 64]"),
    ],
)
def test_other_formats_are_refused_before_weights_are_looked_for(
    quantization: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3")
    (tmp_path / SINGLE).unlink()
    change_json(tmp_path / "config.json", quantization_config=quantization)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(tmp_path, ops=torch_table())
    assert named in str(caught.value) and "forkpoint runs" in str(caught.value)


def test_modelopts_own_file_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP8"}}')
    with pytest.raises(UnsupportedModelError, match="modelopt's MXFP8"):
        load_config(tmp_path)


def test_formats_that_other_files_and_fields_name(tmp_path: Path) -> None:
    """MLX's older folders have no quantization_config, and those for Ascend a file of their own."""
    write_checkpoint(tmp_path, "qwen3")
    (tmp_path / "quant_model_description.json").write_text('{"model_quant_type": "W8A8_DYNAMIC"}')
    with pytest.raises(UnsupportedModelError, match=r"quant_model_description\.json has weights in W8A8_DYNAMIC; fork"):
        load_config(tmp_path)
    change_json(tmp_path / "config.json", quantization={"group_size": 64, "bits": 8})
    with pytest.raises(UnsupportedModelError, match=r"config\.json has weights in MLX's 8 bits; fork"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("plain", "module", "covered"),
    [
        (("lm_head", "model.layers.0.mlp.gate"), "model.layers.0.mlp.gate_proj.weight", True),
        (("lm_head", "model.layers.0.mlp.gate"), "model.layers.0.mlp.gate.weight", False),
        (
            ("model.language_model.layers.1.linear_attn.in_proj_a",),
            "model.layers.1.linear_attn.in_proj_a.weight",
            False,
        ),
        (("model.language_model.layers.1.linear_attn.in_proj_a",), "model.layers.1.linear_attn.in_proj_z.weight", True),
        (("model.layers.1",), "model.layers.1.mlp.up_proj.weight", False),
        (("model.layers.1",), "model.layers.11.mlp.up_proj.weight", True),
        (("re:.*linear_attn.*",), "model.layers.1.linear_attn.out_proj.weight", False),
        (("re:model.language_model.layers.1.mlp.*",), "model.layers.1.mlp.up_proj.weight", False),
        (("re:mlp.*",), "model.layers.1.mlp.up_proj.weight", True),
        (("backbone.layers.1.mixer*",), "model.layers.1.mixer.in_proj.weight", False),
        (("backbone.layers.1.mixer*",), "model.layers.11.mixer.in_proj.weight", True),
        (("*.mixer.conv1d",), "model.layers.11.mixer.conv1d.weight", False),
    ],
)
def test_lists_of_plain_modules(plain: tuple[str, ...], module: str, covered: bool) -> None:
    assert WeightFormat(plain=plain).covers(module) is covered


def official(text: dict[str, Any], multimodal: bool, kept: tuple[str, ...]) -> dict[str, Any]:
    """config.json as Qwen writes it with its block-scaled models: lists of every plain module, layer by layer."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(text["num_hidden_layers"])]
    inner = "model.language_model" if multimodal else "model"
    names = [f"{inner}.layers.{i}.{part}" for i in range(len(kinds)) for part in ("input_layernorm", *kept)]
    quantization = {**QUANTIZATION["block"], "modules_to_not_convert": ["lm_head", f"{inner}.embed_tokens", *names]}
    if multimodal:
        quantization["modules_to_not_convert"] += ["model.visual.blocks.0.attn.qkv", "mtp.fc"]
        text = {"text_config": {**text, "layer_types": kinds, "dtype": "bfloat16"}, "vision_config": {"depth": 27}}
    kind = "Qwen3_5Moe" if "num_experts" in text.get("text_config", ()) else "Qwen3_5"
    name = f"{kind}ForConditionalGeneration" if multimodal else "Qwen3NextForCausalLM"
    return {"architectures": [name], "dtype": "bfloat16", **text, "quantization_config": quantization}


GDN_128 = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SHARED = {"head_dim": 256, "max_position_embeddings": 262144, **GDN_128}
SPARSE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    **SHARED,
}
# What the published ids hold: sizes, formats, and kinds of plain modules.
OFFICIAL = {
    "Qwen/Qwen3.5-35B-A3B-FP8": official(
        {"num_hidden_layers": 40, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8, **SPARSE},
        True,
        ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.conv1d"),
    ),
    "Qwen/Qwen3.5-27B-FP8": official(
        {
            "num_hidden_layers": 64,
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            **SHARED,
        },
        True,
        ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.conv1d"),
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": official(
        {
            "num_hidden_layers": 48,
            "vocab_size": 151936,
            "intermediate_size": 5120,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            **SPARSE,
        },
        False,
        ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_ba", "linear_attn.conv1d"),
    ),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_configs_of_published_models(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL[name]))
    config = load_config(tmp_path)
    found = config.quantization
    assert found is not None and found.by_block and not found.on_load and config.dtype == "bfloat16"
    plain = ("linear_attn.in_proj_ba",) if "Next" in name else ("linear_attn.in_proj_a", "linear_attn.in_proj_b")
    assert not any(found.covers(f"model.layers.4.{part}.weight") for part in (*plain, "linear_attn.conv1d"))
    products = ("linear_attn.out_proj", "linear_attn.in_proj_qkv", "self_attn.q_proj", "mlp.experts.7.up_proj")
    assert all(found.covers(f"model.layers.3.{part}.weight") for part in products)
    if "A3B" in name:
        assert not found.covers("model.layers.3.mlp.gate.weight")
        assert found.covers("model.layers.3.mlp.gate_proj.weight")
