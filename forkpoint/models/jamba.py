"""Jamba: selective scans, with attention without positions at intervals. Dense and sparse MLPs alternate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, PartConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig
from forkpoint.models.mamba import MambaConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.ops.parameters import RouteRule


class Jamba(Model):
    architectures: ClassVar = ("JambaForCausalLM",)
    field_names: ClassVar[Mapping[str, str]] = {
        "intermediate_size": "moe_intermediate_size",
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_dt_rank": "time_step_rank",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    }
    config_class: ClassVar = "jamba.JambaConfig"
    defaults: ClassVar = {"norm_topk_prob": False}
    weight_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("feed_forward.router.", "mlp.gate."),
        ("feed_forward.", "mlp."),
        ("pre_ff_layernorm", "post_attention_layernorm"),
        ("final_layernorm", "norm"),
    )

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        inner = fields.integer("expand", 2) * fields.integer("hidden_size")
        scan = MambaConfig.read(fields, channels=inner, norms=True, name="mamba")
        attention, dense = AttentionConfig.read(fields, qk_norm=None), MLPConfig.read(fields)
        has_experts = fields.integer("num_experts") > 1
        sparse: PartConfig = MoEConfig.of(fields, RouteRule(top_k=0)) if has_experts else dense
        attends = _by_turns(fields, "attn_layer", 8, 4)
        chooses = _by_turns(fields, "expert_layer", 2, 1)
        layers: list[tuple[PartConfig, ...]] = [
            (attention if attends(i) else scan, sparse if chooses(i) else dense)
            for i in range(fields.integer("num_hidden_layers"))
        ]
        return ModelConfig.of(fields, layers)


def _by_turns(fields: Fields, name: str, period: int, offset: int) -> Any:
    """Return a function that says whether a layer's number, modulo `name_period`, is `name_offset`."""
    every, first = fields.integer(f"{name}_period", period), fields.integer(f"{name}_offset", offset, low=0)
    return lambda layer: layer % every == first
