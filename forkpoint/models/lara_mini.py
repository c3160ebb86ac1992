"""LaraMini: gated delta net, attention with a window, and full attention without positions, all with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, PartConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.models.rotary import NO_POSITIONS
from forkpoint.ops.parameters import RouteRule

# The kinds of layers if config.json has no layer_types, repeated.
PATTERN: Final = (
    "linear_attention",
    "sliding_attention",
    "linear_attention",
    "full_attention",
    "sliding_attention",
)


class LaraMini(Model):
    """The family of `LaraMiniForCausalLM`. Only the layers with a window rotate queries and keys."""

    architectures: ClassVar = ("LaraMiniForCausalLM",)
    config_class: ClassVar = "lara_mini.LaraMiniConfig"

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.require("hidden_act", "silu")
        attention = AttentionConfig.read(fields)
        kinds = fields.layer_types(set(PATTERN), lambda layer: PATTERN[layer % len(PATTERN)])
        mixers: dict[str, PartConfig] = {
            "linear_attention": GDNConfig.read(fields, wide=("in_proj",), narrow=(), norm_name="out_norm"),
            "sliding_attention": replace(attention, window=fields.integer("sliding_window")),
            "full_attention": replace(attention, rotary=NO_POSITIONS),
        }
        shared = fields.integer("shared_expert_intermediate_size")
        experts = MoEConfig.of(fields, RouteRule(top_k=0), shared_intermediate_size=shared, wide_router=True)
        layers = [(mixers[kind], experts) for kind in kinds]
        return ModelConfig.of(fields, layers, fields.rotary(attention.head_dim))
