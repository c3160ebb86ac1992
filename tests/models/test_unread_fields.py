"""Fields of config.json that no family reads: refused if they change the logits, taken if not, named if unknown."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from forkpoint.errors import ForkpointError, UnsupportedModelError
from forkpoint.models.registry import load_config, load_model
from forkpoint.ops.select import torch_table
from tests.checkpoints import FAMILIES, make_state_sensitive

# Time steps are clipped in transformers' prefill but not in its decoding, which forkpoint follows (docs/models.md).
# transformers wants `expand` to fit the heads, and has no router logits to output in dense models.
NOT_TRIED = {"time_step_min", "time_step_floor", "time_step_max", "expand", "mamba_expand", "output_router_logits"}
COMMON = {field.name for field in fields(transformers.PreTrainedConfig)}


def changed(value: Any) -> Any:
    """Another value of the same type; None where there is none to guess."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 1.5 + 0.25 if isinstance(value, float) else None


def read(folder: Path, config: dict[str, Any]) -> Any:
    """What forkpoint reads; None where it refuses."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return load_config(folder)
    except ForkpointError:
        return None


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=torch.arange(2, 40)[None], use_cache=False).logits
    return found


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_5_multimodal"])
def test_what_is_taken_and_not_read_changes_no_logits(family: str, tmp_path: Path) -> None:
    """Forkpoint reads or refuses every field of transformers' class that changes its logits."""
    model = FAMILIES[family]()
    make_state_sensitive(model, 0)
    full = json.loads(json.dumps({**model.config.to_dict(), "architectures": [type(model).__name__]}))
    text, want = full.get("text_config"), read(tmp_path, full)
    assert want is not None

    def with_fields(values: dict[str, Any]) -> dict[str, Any]:
        return {**full, **values} if text is None else {**full, "text_config": {**text, **values}}

    own = type(model.config.get_text_config())
    names = [field.name for field in fields(own) if field.name not in COMMON | NOT_TRIED]
    others = {name: changed((text or full).get(name)) for name in names}
    others = {name: value for name, value in others.items() if value is not None}
    silent = {name: value for name, value in others.items() if read(tmp_path, with_fields({name: value})) == want}
    assert "initializer_range" in silent and len(silent) < len(others)
    other = type(model)(type(model.config)(**with_fields(silent)))
    other.load_state_dict(model.state_dict())
    assert float((logits(other) - logits(model)).abs().max()) <= 1e-4 * float(logits(model).std())


KIMI = json.loads((Path(__file__).parent / "hub_configs" / "kimi-linear-48b-a3b.json").read_text())
GLM = json.loads((Path(__file__).parent / "hub_configs" / "glm-5.3-flash.json").read_text())
QWEN4 = json.loads((Path(__file__).parent / "hub_configs" / "qwen3.8-flash-next.json").read_text())
LFM3 = json.loads((Path(__file__).parent / "hub_configs" / "lfm3-1.7b.json").read_text())
LFM3_ROPE = LFM3["rope_parameters"]
ALICE = json.loads((Path(__file__).parent / "hub_configs" / "aliceai-80b-a3b.json").read_text())
LING = json.loads((Path(__file__).parent / "hub_configs" / "ling-2.6-flash.json").read_text())
LLAMA = json.loads((Path(__file__).parent / "hub_configs" / "llama-3.1-8b.json").read_text())


@pytest.mark.parametrize(
    ("config", "more", "text"),
    [
        (
            KIMI,
            {"linear_attn_config": {**KIMI["linear_attn_config"], "gate_lower_bound": -5.0}},
            "gate_lower_bound=-5.0",
        ),
        (
            KIMI,
            {"linear_attn_config": {**KIMI["linear_attn_config"], "use_full_rank_gate": True}},
            "use_full_rank_gate",
        ),
        (KIMI, {"attn_res_block_size": 4}, "attn_res_block_size=4"),
        (KIMI, {"mla_use_output_gate": True}, "mla_use_output_gate=True"),
        (KIMI, {"routed_expert_hidden_size": 512}, "routed_expert_hidden_size=512"),
        (GLM, {"text_config": {**GLM["text_config"], "mhc": False}}, "mhc=false"),
        (GLM, {"text_config": {**GLM["text_config"], "indexer_types": ["shared"] * 45}}, "share an index"),
        (GLM, {"text_config": {**GLM["text_config"], "qk_rope_head_dim": 64}}, "qk_rope_head_dim"),
        (QWEN4, {"text_config": {**QWEN4["text_config"], "ple_layer_ids": [4]}}, "names layer 4, which is attention"),
        (QWEN4, {"text_config": {**QWEN4["text_config"], "ple_conv_kernel_size": 7}}, "more than the 16 tokens"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window=4096"),
        (LLAMA, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA, {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_scaling has partial"),
        (LLAMA, {"rope_scaling": {"full_attention": {"rope_theta": 1e6}}}, "of their own for full_attention"),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "and rope_parameters={.*contradict"),
        (LFM3, {"rope_parameters": {**LFM3_ROPE, "sliding_attention": {"rope_type": "yarn"}}}, "rope_type='yarn'"),
        (LFM3, {"use_qk_norm": True}, "use_qk_norm=True"),
        (ALICE, {"kda_allow_negative_eigenvalues": True}, "kda_allow_negative_eigenvalues=true"),
        (ALICE, {"router_bias_correction": False}, "router_bias_correction=false"),
        (ALICE, {"mlp_only_layers": [3]}, "experts in all layers"),
        (ALICE, {"linear_num_value_heads": 64}, "equal ones"),
        (LING, {"linear_silu": True}, "linear_silu=true"),
        (LING, {"use_qk_norm": False}, "use_qk_norm=false"),
        (LING, {"use_qkv_bias": True}, "use_qkv_bias=True"),
        (LING, {"num_kv_heads_for_linear_attn": 8}, "num_kv_heads_for_linear_attn=8"),
        (LING, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim=1.0"),
    ],
)
def test_a_field_that_changes_the_logits_is_refused(
    config: dict[str, Any], more: dict[str, Any], text: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    with pytest.raises(UnsupportedModelError, match=text):
        load_config(tmp_path)


def test_rope_scaling_may_repeat_rope_parameters(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    once = {name: value for name, value in LLAMA.items() if name not in ("rope_scaling", "rope_theta")}
    once["rope_parameters"] = rope
    for older in ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}, rope, {}, None):
        assert read(tmp_path, {**once, "rope_scaling": older}) == read(tmp_path, once) is not None


def test_a_field_of_which_nothing_is_known_has_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = FAMILIES["kimi_linear"]()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    inner = {"num_heads": 4, "head_dim": 16, "inner_mystery": 3}
    more = {"mystery": 1, "attn_res_block_size": None, "use_full_rank_gate": False, "linear_attn_config": inner}
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    load_model(tmp_path, ops=torch_table())
    assert [record.message for record in caplog.records if record.name.startswith("forkpoint")] == [
        "fields of config.json that forkpoint does not know and does not use: inner_mystery, mystery"
    ]
