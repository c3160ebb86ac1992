"""LFM3: gated short convolutions, attention with a window, and full attention, with norms before and after each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Final

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, PartConfig
from forkpoint.models.convolution import ShortConvConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig, PostNormConfig
from forkpoint.models.lfm2 import Lfm2

# The positions of each kind of attention layer if config.json has no rope_parameters.
ROPE: Final[dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


class Lfm3(Model):
    """The family of `Lfm3ForCausalLM`. Each kind of attention layer has rotary positions of its own."""

    architectures: ClassVar = ("Lfm3ForCausalLM",)
    norms: ClassVar = Lfm2.norms
    config_class: ClassVar = "lfm3.Lfm3Config"
    defaults: ClassVar = {"rope_theta": 1e6}  # for a kind of layer whose object in rope_parameters has no base
    weight_names: ClassVar = (*Lfm2.weight_names, ("self_attn.gate_proj", "self_attn.g_proj"))

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        if not fields.inner("rope_parameters"):
            fields = fields.replaced({"rope_parameters": ROPE})
        width, bias = fields.integer("conv_L_cache", low=2), fields.flag("conv_bias", False)
        conv = ShortConvConfig(channels=fields.integer("hidden_size"), width=width, bias=bias)
        kinds = fields.layer_types(("conv", *ROPE), _default_kind)
        mixers: dict[str, PartConfig] = {"conv": conv}
        attention = AttentionConfig.read(fields, head_gated=fields.flag("use_attention_gate", True))
        for kind in set(ROPE).intersection(kinds):
            window = fields.integer("sliding_window") if kind == "sliding_attention" else None
            rotary = fields.rotary_of_kind(attention.head_dim, kind)
            mixers[kind] = replace(attention, window=window, rotary=rotary)
        layers: list[tuple[PartConfig, ...]] = [(mixers[kind], MLPConfig.read(fields)) for kind in kinds]
        if fields.flag("use_sandwich_norm", True):
            after = ("post_operator_norm", "post_ffn_norm")
            layers = [
                tuple(PostNormConfig((part,), norm=norm) for part, norm in zip(parts, after, strict=True))
                for parts in layers
            ]
        return ModelConfig.of(fields, layers)


def _default_kind(layer: int) -> str:
    """Return the kind of layer `layer` if config.json has no layer_types."""
    if layer % 4 == 2:
        return "full_attention"
    if layer % 4 == 0 and layer > 0:
        return "sliding_attention"
    return "conv"
